"""The resolved configuration as TOML."""

from __future__ import annotations

from collections.abc import Mapping

from titanish.config.keys import OVERRIDE, field_defaults, flat_values
from titanish.config.problem import Source
from titanish.config.schema import Config
from titanish.config.spelling import split_key, toml_key, toml_value


def to_toml(config: Config, sources: Mapping[str, Source] | None = None) -> str:
    """All values of the configuration as TOML; loading it gives an equal configuration.

    Keys without a value (None) are left out, which is also their default. With `sources`, a value that is not
    the default is followed by a comment that says where it came from.
    """
    defaults = field_defaults()
    values = flat_values(config)
    values.pop(OVERRIDE)
    values |= {f"{OVERRIDE}.{toml_key(name)}": value for name, value in config.model.override.items()}
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        if value is None:
            continue
        section, name = split_key(key)
        line = f"{name} = {toml_value(value)}"
        if sources is not None and key in sources and value != defaults.get(key):
            line += f"  # {sources[key]}"
        tables.setdefault(section, []).append(line)
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in tables.items()) + "\n"
