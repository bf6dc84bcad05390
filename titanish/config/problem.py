"""Where a value came from, what is wrong with it, and the one error that lists all that is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from titanish.errors import ConfigError

Level = Literal["error", "start", "note"]
"""`error` fails a check and a start, `start` fails a start and warns in a check, `note` is only shown."""


@dataclass(frozen=True)
class Source:
    """Where a value came from: the built-in default, a line of a file, or a flag of the command line.

    `order` sorts files by when they were met, and flags by their place on the command line.
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

    # A file that two others name as their base is read twice, but its mistakes are told once.
    once = {str(problem): problem for problem in problems}
    return tuple(sorted(once.values(), key=position))


class InvalidConfig(ConfigError):
    """The configuration cannot be used: `problems` says why, `notes` holds what else there was to tell."""

    def __init__(self, problems: Iterable[Problem], notes: Iterable[Problem] = ()) -> None:
        self.problems = in_order(problems)
        self.notes = in_order(notes)
        super().__init__("\n".join(f"{p.where}: {p.message}" for p in self.problems))
