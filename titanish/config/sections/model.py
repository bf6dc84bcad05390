"""The sections about the model: `[model]`, and `[sample]` for text drawn from it at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from titanish.config.sections.base import FiniteFloat, PositiveInt, Section

Scalar = bool | int | FiniteFloat | str


class Model(Section):
    """Which model is trained, and how text becomes its tokens."""

    name: str = "llama3"
    """The model family."""

    flavor: str = "debugmodel"
    """One of the family's sizes."""

    hf_assets_path: str | None = None
    """Folder in Hugging Face layout, with the `tokenizer.json` that `tokenizer = "hf"` reads."""

    tokenizer: Literal["hf", "bytes"] = "hf"
    """`hf` reads `hf_assets_path`; `bytes` needs no file: ids 0-255 are bytes, 256 is BOS, 257 is EOS."""

    override: Mapping[str, Scalar] = Field(default_factory=dict)
    """Size fields that differ from the flavor's, e.g. `n_layers = 4`."""


class Sample(Section):
    """A few lines of text drawn from the model when training ends."""

    enable: bool = False
    """Draw a sample when training ends."""

    prompt: str = ""
    """Text that the sample continues; empty starts a document."""

    max_new_tokens: PositiveInt = 200
    """Length limit of the sample in tokens."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    """Divides the logits before drawing; 0 always takes the likeliest token."""
