"""The sections of the configuration, one small file per subject; `titanish.config.schema` gathers them."""
