"""`debug.detect_anomaly`: the first number that is not finite ends the run, with its step and place. Slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanish.data.loader import StepBatch
from titanish.errors import TitanishError
from titanish.train.job import TrainState
from titanish.train.step import Step


@dataclass(frozen=True)
class AnomalyStep:
    """A step under autograd's anomaly mode, which checks what every operation's backward returns."""

    step: Step
    state: TrainState

    def run(self, batch: StepBatch) -> Tensor:
        try:
            with torch.autograd.set_detect_anomaly(True):
                return self.step.run(batch)
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            raise TitanishError(
                f"step {self.state.step + 1}, rank {dist.get_rank()}: {error} PyTorch's warning above shows "
                "the line of the forward pass that it belongs to (debug.detect_anomaly)"
            ) from error


def finite_loss(state: TrainState) -> Callable[[Tensor], None]:
    """A check of a sum of losses, which waits for the device.

    Raises:
        TitanishError: by the check, if the sum is not finite.
    """

    def check(total: Tensor) -> None:
        value = total.item()
        if not math.isfinite(value):
            where = f"step {state.step + 1}"
            if not torch.is_grad_enabled():
                where = f"validation after step {state.step}"
            raise TitanishError(
                f"{where}, rank {dist.get_rank()}: the loss is {value} in this rank's batch, before any "
                "backward pass (debug.detect_anomaly)"
            )

    return check
