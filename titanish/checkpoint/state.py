"""What of a job goes into a checkpoint as tensors, under names that no mesh changes.

Model and optimizer state are keyed by fully qualified parameter names, so that any mesh loads what any other
saved. Hyper-parameters of the optimizer are not stored: they are the config's to say.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titanish.runtime.seeds import rng_state, set_rng_state

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."
_GROUPS = "param_groups."


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"model": ..., "optimizer": ...} of tensors by name; the tensors are the live ones."""
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return {
        "model": get_model_state_dict(model),
        "optimizer": {key: value for key, value in optimizer_state.items() if key.startswith(_STATE)},
    }


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Hand what was read into `collect`'s tensors back to model and optimizer."""
    set_model_state_dict(model, state["model"])
    groups = {
        key: value
        for key, value in get_optimizer_state_dict(model, optimizer, options=_OPTIONS).items()
        if key.startswith(_GROUPS)
    }
    set_optimizer_state_dict(model, optimizer, {**state["optimizer"], **groups}, options=_OPTIONS)


def rng_to_tensor() -> Tensor:
    """The state of this rank's random number generators as bytes in a tensor."""
    buffer = io.BytesIO()
    torch.save(rng_state(), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def rng_from_tensor(tensor: Tensor) -> None:
    """Put this rank's generators where `rng_to_tensor` found them."""
    set_rng_state(torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True))
