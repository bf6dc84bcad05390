"""Ways to break one thing on purpose, on the ranks themselves; the comparison must object to every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

import titanish.parallel.init
import titanish.parallel.mesh
import titanish.parallel.recompute
import titanish.parallel.tensor
import titanish.train.job
import titanish.train.loss
import titanish.train.step
from titanish.testing.equality import Trace, trace

Patch = Callable[[ExitStack], None]


def _replace(target: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    def apply(stack: ExitStack) -> None:
        stack.enter_context(patch.object(target, name, make(getattr(target, name))))

    return apply


def _mean_instead_of_sum(original: Any) -> Any:
    return lambda module, factor: original(module, float(dist.get_world_size()))


def _own_count(original: Any) -> Any:
    def count(labels: Any, group: Any, device: Any) -> Any:
        return (labels != -100).sum().clamp(min=1).float() * dist.get_world_size(group)

    return count


def _grad_of_a_norm_stays_here(original: Any) -> Any:
    def local(parameter: Any, grad: Any = None) -> Any:
        return original(parameter, Replicate() if grad is not None and grad.is_partial() else grad)

    return local


def _key_with_rank(original: Any) -> Any:
    return lambda key: original(f"{key}:{dist.get_rank()}")


def _count_replicas(original: Any) -> Any:
    def clip(parameters: Any, max_norm: float, counted_here: Any) -> Any:
        return original(parameters, max_norm, lambda tensor: True)

    return clip


def _slightly_other(original: Any) -> Any:
    def run_again(forward: Any, *args: Any, **keywords: Any) -> Any:
        return original(forward, *args, **keywords) * (1 + 1e-6)

    return run_again


SABOTAGES: dict[str, Patch] = {
    "fsdp-averages-gradients": _replace(FSDPModule, "set_gradient_divide_factor", _mean_instead_of_sum),
    "replicas-are-not-summed": _replace(
        titanish.parallel.mesh.Mesh, "fsdp", lambda original: property(lambda mesh: mesh.parameters["fsdp"])
    ),
    "row-sums-left-out": _replace(
        titanish.parallel.tensor.TensorParallel,
        "leave",
        lambda original: lambda self, x: _first_shard(self, x),
    ),
    "norm-gradients-not-summed": _replace(
        titanish.parallel.tensor, "local_parameter", _grad_of_a_norm_stays_here
    ),
    "vocabulary-statistics-not-summed": _replace(
        titanish.train.loss, "all_reduce", lambda original: lambda x, *rest: x
    ),
    "labels-counted-per-rank": _replace(titanish.train.step, "count_labels", _own_count),
    "weights-drawn-per-rank": _replace(titanish.parallel.init, "_generator", _key_with_rank),
    "norm-counts-replicas": _replace(titanish.train.job, "clip_gradients", _count_replicas),
    "recompute-computes-something-else": _replace(titanish.parallel.recompute, "checkpoint", _slightly_other),
}


def _first_shard(tp: Any, x: Any) -> Any:
    """This rank's part of the sequence without the other ranks' contributions to it."""
    return x.chunk(tp.size, dim=1)[tp.rank] if tp.sequence_parallel else x


def sabotaged(name: str, flags: Sequence[str], steps: int) -> Trace:
    """`trace` with one thing broken."""
    with ExitStack() as stack:
        SABOTAGES[name](stack)
        return trace(flags, steps)
