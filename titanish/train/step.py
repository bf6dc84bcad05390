"""Forward and backward of one optimizer step on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanish.data.loader import IGNORED_LABEL, StepBatch
from titanish.parallel.fsdp import fsdp_modules
from titanish.train.loss import TokenLoss


class Step(Protocol):
    """Adds the gradients of one global batch; plain and pipelined steps stand behind this."""

    def run(self, batch: StepBatch) -> Tensor:
        """This rank's share of the loss: the shares of the `loss` ranks add up to it. Float32, no
        gradient."""
        ...


@dataclass(frozen=True)
class PlainStep:
    """A step without a pipeline: microbatch by microbatch.

    The loss is the sum of token cross-entropies over the global batch divided by its number of labels, which
    is counted before the first forward. Microbatches and ranks only add (gradients are summed, never
    averaged), so it does not matter how the batch is cut or how unevenly labels lie in it.
    """

    model: nn.Module
    loss: TokenLoss
    microbatch: int
    batch_group: dist.ProcessGroup
    device: torch.device
    reduce_every_microbatch: bool

    def run(self, batch: StepBatch) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]  # (samples, seq)
        count = count_labels(labels, self.batch_group, self.device)
        positions = torch.arange(tokens.size(1), device=self.device)
        share = torch.zeros((), device=self.device)
        microbatches = list(zip(tokens.split(self.microbatch), labels.split(self.microbatch), strict=True))
        for index, (inputs, targets) in enumerate(microbatches):
            self._reduce_after(last=index == len(microbatches) - 1)
            hidden = self.model(inputs.to(self.device, non_blocking=True), positions)
            loss = self.loss(hidden, targets.to(self.device, non_blocking=True)) / count
            loss.backward()
            share += loss.detach()
        return share

    def _reduce_after(self, *, last: bool) -> None:
        if not self.reduce_every_microbatch:
            for module in fsdp_modules(self.model):
                module.set_requires_gradient_sync(last, recurse=False)


def count_labels(labels: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The number of labels that count, over all ranks that read different data; at least 1, a float32
    scalar."""
    # float64 on the way: exact up to 2^53 labels, and every backend sums it
    count = (labels != IGNORED_LABEL).sum().to(device, torch.float64, non_blocking=True)
    dist.all_reduce(count, group=group)
    return count.clamp(min=1).float()


@torch.no_grad()
def summed_loss(
    model: nn.Module, loss: TokenLoss, batch: StepBatch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies, number of labels) of this rank's `batch` without gradients, float64
    scalars."""
    tokens, labels = (batch[name].to(device, non_blocking=True) for name in ("tokens", "labels"))
    positions = torch.arange(tokens.size(1), device=device)
    total: Any = loss(model(tokens, positions), labels)
    return total.double(), (labels != IGNORED_LABEL).sum().double()
