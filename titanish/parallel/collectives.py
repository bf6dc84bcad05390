"""Tensor-parallel communication as autograd functions on plain local tensors.

Each is a pair: what it does forward, its transpose does backward.

    gather_sequence      (batch, seq/tp, dim) -> (batch, seq, dim)    backward: reduce-scatter
    scatter_sequence_sum (batch, seq, dim) -> (batch, seq/tp, dim)    backward: all-gather
    share                identity                                     backward: all-reduce
    sum_over             all-reduce                                   backward: identity

With sequence parallelism the first pair surrounds attention and feed-forward, without it the second
(Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SEQ = 1  # tensor dimension


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seq/tp, ...) on each rank -> (batch, seq, ...) on all; gradients are summed back into
    shards."""
    return _GatherSequence.apply(x, group)


def scatter_sequence_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum (batch, seq, ...) over ranks and keep this rank's (batch, seq/tp, ...); seq must divide."""
    return _ScatterSequenceSum.apply(x, group)


def share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, equal on all ranks, for use by each rank's own part; gradients of the parts are summed."""
    return _Share.apply(x, group)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over ranks, on all of them; the gradient is equal on all and passes through."""
    return _SumOver.apply(x, group)


# The operators under `torch.distributed._functional_collectives` rather than its functions (renamed between
# PyTorch 2.11 and 2.13) or `dist.all_gather_into_tensor` (in place, which selective recompute cannot save):
# they return new tensors, and they are what torch.compile and async tensor parallelism look for.
_ops = torch.ops._c10d_functional


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seq/tp, ...) -> (batch, seq, ...)."""
    ranks = group.size()
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))
    return torch.cat(gathered.chunk(ranks), dim=_SEQ)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seq, ...) -> (batch, seq/tp, ...)."""
    ranks = group.size()
    stacked = torch.cat(x.chunk(ranks, dim=_SEQ))
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", ranks, group.group_name))


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The reduction of `x` over ranks as a new tensor, outside autograd."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.group_name))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ScatterSequenceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
