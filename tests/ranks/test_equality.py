"""The equality table: every layout trains what one rank trains.

Each row is compared with one rank on loss, gradient norm, every gradient and every parameter after one SGD
step, and on loss and norm over ten AdamW steps; initial weights and batches must be the same bits. Labels are
uneven: rows keep between one label and all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.ranks.layouts import ADAMW, JOB, LAYOUTS, SGD, Layout
from tests.ranks.sabotage import sabotaged
from titanish.testing.equality import BITWISE, Trace, compare, trace, whole_batches
from titanish.testing.ranks import RankPool

Pool = Callable[[int], RankPool]

VARIANTS = {
    "": (),
    "tied": ("--model.override.tied_embeddings=true",),
    "uneven-ffn": ("--model.override.hidden_dim=91",),
    "one-kv-head": ("--model.override.n_kv_heads=1",),
}


@pytest.fixture(scope="module")
def one_rank(pool: Pool) -> Callable[..., Trace]:
    """The reference runs, each made once."""

    @cache
    def run(steps: int, flags: tuple[str, ...]) -> Trace:
        return pool(1).run(trace, (*JOB, *Layout().command_line(), *flags), steps)[0]

    return run


def check_row(
    pool: Pool, one_rank: Callable[..., Trace], layout: Layout, accumulation: int, variant: str = ""
) -> None:
    flags = VARIANTS[variant]
    for steps, optimizer in ((1, SGD), (10, ADAMW)):
        command = (*JOB, *layout.command_line(accumulation), *flags, *optimizer)
        traces = pool(layout.world_size).run(trace, command, steps, tensors=steps == 1)
        reference = one_rank(steps, (*flags, *optimizer))
        for step, (ours, theirs) in enumerate(zip(whole_batches(traces), reference.tokens, strict=True)):
            assert torch.equal(ours, theirs), f"step {step + 1} has other batches"
        if steps > 1:
            reference = Trace(losses=reference.losses, norms=reference.norms)
        for rank, each in enumerate(traces):
            assert compare(reference, each) == [], f"rank {rank}"


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_what_one_rank_trains(
    pool: Pool, one_rank: Callable[..., Trace], name: str, accumulation: int
) -> None:
    check_row(pool, one_rank, LAYOUTS[name], accumulation)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("tied", name) for name in ("fsdp2", "ddp2", "tp2", "fsdp2-tp2")),
        *(("uneven-ffn", name) for name in ("tp2", "tp4", "fsdp2-tp2")),
        *(("one-kv-head", name) for name in ("tp2", "tp4", "fsdp2-tp2")),
    ],
)
def test_model_variant_trains_what_one_rank_trains(
    pool: Pool, one_rank: Callable[..., Trace], name: str, variant: str
) -> None:
    check_row(pool, one_rank, LAYOUTS[name], 1, variant)


@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        pytest.param(
            Layout(tp=2, flags=("--parallelism.disable_loss_parallel",)), 1, id="tp2-gathered-logits"
        ),
        pytest.param(
            Layout(shard=2, flags=("--parallelism.reduce_gradients=step",)), 3, id="fsdp2-reduced-once"
        ),
        pytest.param(
            Layout(shard=2, tp=2, flags=("--parallelism.reduce_gradients=step",)),
            3,
            id="fsdp2-tp2-reduced-once",
        ),
        pytest.param(
            Layout(replicate=2, flags=("--parallelism.reduce_gradients=step",)), 3, id="ddp2-reduced-once"
        ),
        pytest.param(
            Layout(shard=2, flags=("--parallelism.fsdp_reshard_after_forward=never",)), 3, id="fsdp2-zero2"
        ),
        pytest.param(Layout(), 3, id="one-rank-accumulating"),
    ],
)
def test_option_trains_what_one_rank_trains(
    pool: Pool, one_rank: Callable[..., Trace], layout: Layout, accumulation: int
) -> None:
    check_row(pool, one_rank, layout, accumulation)


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [
        ("fsdp-averages-gradients", "fsdp2"),
        ("replicas-are-not-summed", "ddp2"),
        ("replicas-are-not-summed", "hsdp2x2"),
        ("norm-counts-replicas", "ddp2"),
        ("row-sums-left-out", "tp2"),
        ("row-sums-left-out", "tp2-without-sp"),
        ("norm-gradients-not-summed", "tp2"),
        ("norm-gradients-not-summed", "tp4"),  # KV heads shared by two ranks take the same way
        ("vocabulary-statistics-not-summed", "tp2"),
        ("labels-counted-per-rank", "fsdp2"),
        ("weights-drawn-per-rank", "fsdp2-tp2"),
    ],
)
def test_comparison_objects_to_what_is_broken_on_purpose(
    pool: Pool, one_rank: Callable[..., Trace], sabotage: str, name: str
) -> None:
    layout = LAYOUTS[name]
    command = (*JOB, *layout.command_line(), *SGD)
    broken = pool(layout.world_size).run(sabotaged, sabotage, command, 1)[0]
    assert compare(one_rank(1, SGD), broken) != []


RECOMPUTE = {
    "full": ("--activation_checkpoint.mode=full",),
    "every-layer": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=1",
    ),
    "every-2nd-layer": ("--activation_checkpoint.mode=selective",),
    "op": ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    "op-forcing-w2": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        '--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=["w2"]',
    ),
}


@pytest.mark.parametrize("name", ["one", "fsdp2", "tp2", "fsdp2-tp2"])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recompute_is_bitwise(pool: Pool, name: str, mode: str) -> None:
    layout = {"one": Layout(), **LAYOUTS}[name]
    command = (*JOB, *layout.command_line(3), *SGD)
    ranks = pool(layout.world_size)
    assert compare(_kept(ranks, command), ranks.run(trace, (*command, *RECOMPUTE[mode]), 1)[0], BITWISE) == []


@cache
def _kept(ranks: RankPool, command: tuple[str, ...]) -> Trace:
    return ranks.run(trace, command, 1)[0]


def test_comparison_objects_to_a_recompute_that_computes_something_else(pool: Pool) -> None:
    command = (*JOB, *Layout().command_line(3), *SGD)
    broken = pool(1).run(sabotaged, "recompute-computes-something-else", (*command, *RECOMPUTE["full"]), 1)[0]
    assert compare(_kept(pool(1), command), broken, BITWISE) != []


@pytest.mark.ranks8
@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(1, 2, 4), Layout(shard=8)], ids=str)
def test_eight_ranks_train_what_one_rank_trains(
    pool: Pool, one_rank: Callable[..., Trace], layout: Layout
) -> None:
    # A global batch of 12 does not fall on 8 ranks: this row has its own.
    flags = ("--training.global_batch_size=8", "--training.local_batch_size=1", *SGD)
    reference = pool(1).run(trace, (*JOB, *Layout().command_line(), *flags), 1)[0]
    for each in pool(8).run(trace, (*JOB, *layout.command_line(), *flags), 1):
        assert compare(reference, each) == []
