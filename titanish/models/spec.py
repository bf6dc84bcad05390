"""What a model family tells the rest of titanish about itself: data and two functions, nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from titanish.models.plan import TensorParallelPlan


class Decoder(Protocol):
    """The parts by which every decoder is known; names survive a pipeline split because layers are keyed.

    `forward(tokens, positions)` takes int64 tensors of shape (batch, seq) and (seq,) or (batch, seq) and
    returns the normalised hidden states (batch, seq, dim); `output` turns those into logits.
    """

    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    output: nn.Linear | None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Init:
    """How one parameter starts: a constant, or normal with mean 0 and standard deviation `std`."""

    std: float = 0.0
    constant: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """One family.

    Attributes:
        build: size -> module. Called on the meta device; draws no weights.
        init: (size, parameter name) -> how that parameter starts.
        tp_plan: size -> module name pattern -> style (`models/plan.py`).
        tied: size -> names of parameters that are the same tensor, as (copy, original) pairs.
        hf_names: size -> our parameter name -> Hugging Face tensor name; complete and one to one.
        hf_architecture: the class name in a Hugging Face `config.json`.
    """

    name: str
    build: Callable[[Any], nn.Module]
    init: Callable[[Any, str], Init]
    tp_plan: Callable[[Any], TensorParallelPlan]
    tied: Callable[[Any], tuple[tuple[str, str], ...]]
    hf_names: Callable[[Any], Mapping[str, str]]
    hf_architecture: str
