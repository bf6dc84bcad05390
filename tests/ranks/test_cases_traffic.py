"""What a step sends over ranks, counted: gathers, reductions and their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks.layouts import JOB, LAYOUTS, Layout
from titanish.testing.equality import build_job
from titanish.testing.ranks import RankPool

Pool = Callable[[int], RankPool]
Counts = Counter[tuple[str, str]]

LAYERS = 2
GROUPS = LAYERS + 2  # of parameters: each layer, the embedding, and the root with norm and head


class Collectives(TorchDispatchMode):
    """Counts collectives as (operator, type of what is sent)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            name = str(func).removesuffix(".default").removeprefix("_c10d_functional.").removeprefix("c10d.")
            self.counts[name, str(tensors[-1].dtype).removeprefix("torch.")] += 1
        return func(*args, **(kwargs or {}))


def traffic(flags: tuple[str, ...]) -> tuple[Counts, set[torch.dtype]]:
    """Collectives of one step's forward and backward passes, and the types of the gradients."""
    job, _ = build_job(flags)
    batch = next(iter(job.loader))
    with Collectives() as seen:
        job.step.run(batch)
    gradients = [p.grad for p in job.model.parameters()]
    return seen.counts, {(g.to_local() if isinstance(g, DTensor) else g).dtype for g in gradients}


def of_a_step(pool: Pool, layout: Layout, accumulation: int, *more: str) -> Counts:
    counts, types = pool(layout.world_size).run(traffic, (*JOB, *layout.command_line(accumulation), *more))[0]
    assert types == {torch.float32}
    counted = counts.pop(("allreduce_", "float64"))
    assert counted == 1  # the number of labels, once a step
    return counts


# Every microbatch gathers a layer or the embedding before its forward and again before its backward; the root
# stays gathered in between.
ZERO3 = 2 * (GROUPS - 1) + 1


@pytest.mark.parametrize(
    ("flags", "gathers", "reductions"),
    [
        pytest.param((), 3 * ZERO3, 3 * GROUPS, id="default"),
        pytest.param(("--parallelism.reduce_gradients=step",), 3 * ZERO3, GROUPS, id="reduced-once-a-step"),
        pytest.param(
            ("--parallelism.fsdp_reshard_after_forward=never",), 3 * GROUPS, 3 * GROUPS, id="gathered-once"
        ),
        pytest.param(
            ("--parallelism.fsdp_reshard_after_forward=never", "--parallelism.reduce_gradients=step"),
            3 * GROUPS,
            GROUPS,
            id="gathered-once-and-reduced-once",
        ),
    ],
)
def test_fsdp_gathers_and_reduces_as_often_as_its_settings_say(
    pool: Pool, flags: tuple[str, ...], gathers: int, reductions: int
) -> None:
    assert of_a_step(pool, LAYOUTS["fsdp2"], 3, *flags) == {
        ("_allgather_base_", "float32"): gathers,
        ("_reduce_scatter_base_", "float32"): reductions,
    }


@pytest.mark.parametrize(("reduce", "reductions"), [("microbatch", 3 * GROUPS), ("step", GROUPS)])
def test_ddp_gathers_nothing(pool: Pool, reduce: str, reductions: int) -> None:
    flag = f"--parallelism.reduce_gradients={reduce}"
    assert of_a_step(pool, LAYOUTS["ddp2"], 3, flag) == {("allreduce_", "float32"): reductions}


def test_bfloat16_parameters_travel_in_bfloat16_and_their_gradients_in_float32(pool: Pool) -> None:
    counts = of_a_step(pool, LAYOUTS["fsdp2"], 1, "--training.mixed_precision_param=bfloat16")
    assert counts == {("_allgather_base_", "bfloat16"): ZERO3, ("_reduce_scatter_base_", "float32"): GROUPS}


LOSS_CHUNKS = -(-12 * 33 // 20)  # of 20 tokens; each reduces its peaks, then its sums and targets


@pytest.mark.parametrize("layers", [2, 3])
def test_sequence_parallel_gathers_and_scatters_four_times_a_layer(pool: Pool, layers: int) -> None:
    # Attention and feed-forward each gather when they begin and scatter when they end, and the backward pass
    # does the transpose of each. Outside the layers, the embedding scatters and the head gathers.
    counts = of_a_step(pool, LAYOUTS["tp2"], 1, f"--model.override.n_layers={layers}")
    norms = 2 * layers + 1  # each rank has its share of the sequence's gradient
    del counts["_wrap_tensor_autograd", "float32"]  # no communication
    assert counts == {
        ("all_gather_into_tensor", "float32"): 4 * layers + 2,
        ("reduce_scatter_tensor", "float32"): 4 * layers + 2,
        ("all_reduce", "float32"): norms + 2 * LOSS_CHUNKS,
    }


@pytest.mark.parametrize("layers", [2, 3])
def test_without_sequence_parallel_sums_are_taken_four_times_a_layer(pool: Pool, layers: int) -> None:
    counts = of_a_step(pool, LAYOUTS["tp2-without-sp"], 1, f"--model.override.n_layers={layers}")
    assert counts == {("all_reduce", "float32"): 4 * layers + 2 + 2 * LOSS_CHUNKS}


def test_fsdp_and_tensor_parallel_together_send_what_each_sends(pool: Pool) -> None:
    counts = of_a_step(pool, LAYOUTS["fsdp2-tp2"], 1)
    assert counts["_allgather_base_", "float32"] == ZERO3
    assert counts["_reduce_scatter_base_", "float32"] == GROUPS
    assert counts["all_gather_into_tensor", "float32"] == 4 * LAYERS + 2
    assert counts["reduce_scatter_tensor", "float32"] == 4 * LAYERS + 2
