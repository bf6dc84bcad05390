"""What all sections share: strictness, and the few value ranges that pydantic has no word for."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """One table of the TOML file: immutable, without unknown keys, and without silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _not_empty(value: str) -> str:
    if value.strip():
        return value
    raise PydanticCustomError("not_empty", "must not be empty")


def _minus_one_or_positive(value: int) -> int:
    if value == -1 or value >= 1:
        return value
    raise PydanticCustomError("minus_one_or_positive", "must be -1 or at least 1")


Count = Annotated[int, Field(ge=0)]
"""A number of things, possibly none."""

PositiveInt = Annotated[int, Field(ge=1)]
"""A number of things of which there is at least one."""

AutoInt = Annotated[int, AfterValidator(_minus_one_or_positive)]
"""A number of things, or -1 for "all of them" or "what fits"; the key's description says which."""

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number of tokens or sequences that are in memory together: more would overflow a 32-bit index."""

AutoSize = Annotated[AutoInt, Field(le=2**31 - 1)]
"""A size, or -1 as for `AutoInt`."""

LARGEST_STEP = 2**53
"""Beyond it a float, and so a curve of the run, no longer tells a step from the next."""

Steps = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
"""A number of steps of which there is at least one."""

Seconds = Annotated[int, Field(ge=1, le=10**7)]
"""A time limit of at most about four months."""

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A share of a whole, both ends included."""

Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""A coefficient of a running average: 1 would never take anything in."""

Name = Annotated[str, AfterValidator(_not_empty)]
"""A name or path that cannot be left empty."""

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
