"""Optimizers by name; every parameter is in one group and decays alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from titanish.config.schema import Optimizer


def build_optimizer(section: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `section` names, over sharded or plain parameters."""
    common: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    if section.name == "SGD":
        # DTensor has no sharding rule for the fused form of SGD (PyTorch 2.13)
        foreach = section.implementation != "for-loop"
        return torch.optim.SGD(parameters, momentum=section.momentum, foreach=foreach, **common)
    common |= {"fused": section.implementation == "fused", "foreach": section.implementation == "foreach"}
    kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[section.name]
    return kind(parameters, betas=(section.beta1, section.beta2), eps=section.eps, **common)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
