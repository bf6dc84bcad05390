"""Loss on held-out data, weighted by tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from titanish.data.loader import ValidationBatches
from titanish.parallel.fsdp import release_gathered
from titanish.train.loss import TokenLoss
from titanish.train.step import summed_loss


@dataclass(frozen=True)
class Validation:
    """The mean cross-entropy per token over the same batches at every call, whatever their size and mesh."""

    model: nn.Module
    loss: TokenLoss
    batches: ValidationBatches
    loss_group: dist.ProcessGroup
    device: torch.device

    def run(self) -> float:
        """Sum over all tokens of all ranks, divided by their number."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.batches:
            totals += torch.stack(summed_loss(self.model, self.loss, batch, self.device))
        release_gathered(self.model)
        dist.all_reduce(totals, group=self.loss_group)
        total, count = totals.tolist()
        return total / count

    def close(self) -> None:
        """Ends the workers that load the batches."""
        self.batches.close()
