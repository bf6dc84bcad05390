"""How TOML spells values and keys."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

_LONGEST_VALUE = 60
_LAST_SEGMENT = re.compile(r"""(?:(?P<table>.*)\.)?(?P<name>"(?:[^"\\]|\\.)*"|[^".]*)""", re.DOTALL)


def toml_value(value: object) -> str:
    """The value as TOML writes it. Raises TypeError for what TOML cannot hold, such as None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # JSON's escapes are a subset of TOML's, but JSON leaves DEL as it is and TOML forbids it.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    raise TypeError(f"TOML has no {type(value).__name__}")


def toml_key(name: str) -> str:
    """The name as one segment of a TOML key, quoted if it must be."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else toml_value(name)


def shown(value: object) -> str:
    """The value as a message shows it: as in TOML, on one line, cut where it is long."""
    try:
        text = toml_value(value)
    except TypeError:  # dates and times, which TOML has and no key takes
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def split_key(key: str) -> tuple[str, str]:
    """The table and the last name of a dotted key, both as spelled; the table is "" at the top level."""
    match = _LAST_SEGMENT.fullmatch(key)
    return (match["table"] or "", match["name"]) if match else ("", key)


def plain_name(name: str) -> str:
    """The name without the quotes that `toml_key` may have added."""
    return str(json.loads(name)) if name.startswith('"') else name
