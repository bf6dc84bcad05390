"""Where a value came from, what is wrong with it, and the one error that lists all that is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from titanish.errors import ConfigError

Level = Literal["error", "start", "note"]
"""`error` fails a check and a start, `start` fails a start and warns in a check, `note` is only shown."""

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Source:
    """Where a value came from: the built-in default, a line of a file, or a flag of the command line.

    `order` counts files, then flags, in the order in which they are applied.
    """

    kind: Literal["default", "file", "flag"] = "default"
    file: str = ""
    line: int = 0
    flag: str = ""
    order: int = 0

    def __str__(self) -> str:
        if self.kind == "flag":
            return self.flag
        if self.kind == "file":
            return f"{self.file}:{self.line}" if self.line else self.file
        return "default"


DEFAULT = Source()


@dataclass(frozen=True)
class Problem:
    """One thing to tell the user; `message` is the whole sentence, key and value included."""

    level: Level
    where: Source
    key: str
    value: object
    message: str

    def __str__(self) -> str:
        prefix = {"error": "", "start": "fails a start: ", "note": "note: "}[self.level]
        return f"{self.where}: {prefix}{self.message}"


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems as a reader meets them: by file and line, then flags, then defaults; each one once."""

    def position(problem: Problem) -> tuple[int, int, int]:
        where = problem.where
        return ("file", "flag", "default").index(where.kind), where.order, where.line

    return tuple(sorted(dict.fromkeys(problems), key=position))


class InvalidConfig(ConfigError):
    """The configuration cannot be used: `problems` says why, `notes` holds what else there was to tell."""

    def __init__(self, problems: Iterable[Problem], notes: Iterable[Problem] = ()) -> None:
        self.problems = in_order(problems)
        self.notes = in_order(notes)
        super().__init__("\n".join(f"{p.where}: {p.message}" for p in self.problems))


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
