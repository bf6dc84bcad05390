"""What a rule is, and what it may know.

A rule names the keys it reads (a section stands for all of its keys) and runs once nothing is wrong with
those: a mistake is reported once, and hides no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from titanish.config.keys import value_at
from titanish.config.problem import DEFAULT, Level, Problem, Source
from titanish.config.schema import Config
from titanish.config.spelling import shown


class Size(Protocol):
    """What every model family's size tells; sizes are handed in, so that config knows no model."""

    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...


@dataclass(frozen=True)
class Facts:
    """The configuration as rules see it; a key that was wrong holds its default.

    `fallback` is the place of problems with keys that nobody wrote down. `complete` says that every value
    written down found its section: if not, a rule about what is missing would only add to the confusion.
    """

    config: Config
    sources: Mapping[str, Source]
    size: Size | None = None
    device_type: str | None = None
    fallback: Source = DEFAULT
    complete: bool = True

    def source(self, key: str) -> Source:
        """Where the key's value came from."""
        return self.sources.get(key, DEFAULT)

    def written(self, key: str) -> bool:
        """Whether somebody wrote the key down."""
        return self.source(key).kind != "default"

    def cite(self, key: str) -> str:
        """The key with its value and source, as a message names it."""
        return f"{key} = {shown(value_at(self.config, key))} ({self.source(key)})"

    def problem(self, level: Level, key: str, message: str, *others: str) -> Problem:
        """A problem with `key`, placed there, else at the first of the others that somebody wrote down."""
        place = next((self.source(k) for k in (key, *others) if self.written(k)), self.fallback)
        # The place stands in front of the message, so citing it once more would only make the line longer.
        return Problem(level, place, key, value_at(self.config, key), message.replace(f" ({place})", ""))


@dataclass(frozen=True)
class Rule:
    """A check, and the keys or sections that it takes to be valid."""

    reads: tuple[str, ...]
    check: Callable[[Facts], Iterator[Problem]]


def rule(*reads: str) -> Callable[[Callable[[Facts], Iterator[Problem]]], Rule]:
    """Makes a rule of a function that yields the problems it finds."""
    return lambda check: Rule(reads, check)


def any_doubt(reads: Collection[str], doubtful: Collection[str]) -> bool:
    """Whether one of the keys or sections read is, holds or lies in one that is in doubt."""
    pairs = ((f"{read}.", f"{key}.") for read in reads for key in doubtful)
    return any(read.startswith(key) or key.startswith(read) for read, key in pairs)
