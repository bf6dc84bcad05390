"""Every error that a user of titanish can cause, in one small hierarchy.

The message follows one pattern: where, which key or file, which value, which rule, what to do. `assert` and
plain Python errors are kept for mistakes of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TitanishError(Exception):
    """Base of all errors that tell a user what to change; shown without a traceback."""


class ConfigError(TitanishError):
    """The configuration cannot be used; the message lists every problem found."""


class DataError(TitanishError):
    """A dataset, tokenizer or token file cannot be used."""


class CheckpointError(TitanishError):
    """A checkpoint cannot be written, found or read."""


class ConversionError(TitanishError):
    """Weights cannot be mapped to or from another naming of the same model."""


@dataclass(frozen=True)
class SizeProblem:
    """One wrong value among a model's size fields.

    `field` is "name", "flavor" or a size field; `nearest` names what may be meant, "" if nothing is close.
    """

    field: str
    value: object
    message: str
    nearest: str = ""


class SizeError(ConfigError):
    """A model name, flavor or size override is wrong; `problems` holds all of them."""

    def __init__(self, problems: Sequence[SizeProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.field} = {p.value!r}: {p.message}" for p in self.problems))
