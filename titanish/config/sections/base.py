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

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole, both ends included."""

Decay = Annotated[float, Field(ge=0, lt=1)]
"""A coefficient of a running average: 1 would never take anything in."""

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
