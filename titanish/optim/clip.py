"""The gradient's norm over the whole model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, counted_here: Callable[[Tensor], bool]
) -> Tensor:
    """The L2 norm of all gradients before clipping, a float32 scalar; gradients are then scaled to
    `max_norm`.

    Every element counts once whatever the mesh: a rank adds up the shards it answers for (`counted_here`) and
    one sum over all ranks gives the whole, with pipeline stages and experts in it. Nothing is scaled if
    `max_norm` is infinite.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    counted = [
        shard for grad, shard in zip(gradients, local, strict=True) if counted_here(grad) and shard.numel()
    ]
    device = local[0].device if local else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if math.isfinite(max_norm) and local:
        # No branch on the value: reading it would make the device wait.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, scale)
    return norm
