"""The `titanish` command: verbs that are imported only when called, and no logic of their own."""
