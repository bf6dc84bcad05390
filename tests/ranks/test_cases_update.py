"""What a step does to gradients and parameters: clipping, decay, and the learning rate reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.ranks.layouts import JOB, LAYOUTS, SGD, Layout
from titanish.data.loader import IGNORED_LABEL
from titanish.optim.clip import clip_gradients
from titanish.parallel.shards import counted_here
from titanish.testing.equality import build_job, whole_tensors
from titanish.testing.ranks import RankPool
from titanish.train.job import run, train_step, update

Pool = Callable[[int], RankPool]
MESHES = {"one": Layout(), **{name: LAYOUTS[name] for name in ("fsdp2", "tp2", "fsdp2-tp2", "ddp2")}}


# -------------------------------------------------------------------------------------------------- clipping


def clip_plain(max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """Norm and gradients of plain parameters of several shapes, one of them without a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (7,), (2, 3, 5), (0, 4), (2,))]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    norm = clip_gradients(parameters, max_norm, counted_here)
    return norm, [p.grad for p in parameters[:-1]]


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clipping_is_torchs(pool: Pool, max_norm: float) -> None:
    norm, ours = pool(1).run(clip_plain, max_norm)[0]
    _, unclipped = pool(1).run(clip_plain, float("inf"))[0]
    reference = [nn.Parameter(torch.zeros_like(gradient)) for gradient in unclipped]
    for parameter, gradient in zip(reference, unclipped, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(reference, max_norm)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for gradient, parameter in zip(ours, reference, strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-6)
    assert (max_norm == 0.5) == (not torch.equal(ours[0], unclipped[0]))


def clip_job(flags: tuple[str, ...], max_norm: float) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The norm that a job finds, and its whole gradients before and after."""
    job, _ = build_job(flags)
    job.step.run(next(iter(job.loader)))
    before = whole_tensors(job, lambda p: p.grad)
    norm = clip_gradients(job.model.parameters(), max_norm, counted_here)
    return norm.item(), before, whole_tensors(job, lambda p: p.grad)


def norm_of(tensors: dict[str, Tensor]) -> float:
    return torch.stack([t.double().norm() for t in tensors.values()]).norm().item()


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_clips_by_the_norm_of_the_whole_gradient(pool: Pool, name: str) -> None:
    layout = MESHES[name]
    for norm, before, after in pool(layout.world_size).run(clip_job, (*JOB, *layout.command_line()), 0.25):
        assert norm == pytest.approx(norm_of(before), rel=1e-6)
        assert norm > 0.5
        assert norm_of(after) == pytest.approx(0.25, rel=1e-5)


def test_an_infinite_limit_scales_nothing(pool: Pool) -> None:
    layout = MESHES["fsdp2"]
    flags = (*JOB, *layout.command_line())
    for norm, before, after in pool(2).run(clip_job, flags, float("inf")):
        assert norm == pytest.approx(norm_of(before), rel=1e-6)
        assert all(torch.equal(before[key], after[key]) for key in before)


def norm_with_a_nan_on_the_last_rank(flags: tuple[str, ...]) -> float:
    job, _ = build_job(flags)
    job.step.run(next(iter(job.loader)))
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        gradient = job.model.get_parameter("layers.1.feed_forward.w1.weight").grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0, 0] = float("nan")
    return clip_gradients(job.model.parameters(), 1.0, counted_here).item()


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "fsdp2-tp2"])
def test_a_nan_in_one_ranks_shard_is_seen_on_all_ranks(pool: Pool, name: str) -> None:
    layout = MESHES[name]
    norms = pool(layout.world_size).run(norm_with_a_nan_on_the_last_rank, (*JOB, *layout.command_line()))
    assert all(norm != norm for norm in norms)


# ----------------------------------------------------------------------------------------------------- decay

DECAY = ("--optimizer.lr=0.1", "--optimizer.weight_decay=0.5", "--lr_scheduler.warmup_steps=0")


def step_without_labels(flags: tuple[str, ...]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss and parameters before and after a step on a batch of which nothing counts."""
    job, _ = build_job(flags)
    batch = next(iter(job.loader))
    batch["labels"].fill_(IGNORED_LABEL)
    before = whole_tensors(job, lambda p: p)
    loss = job.step.run(batch)
    update(job, loss)
    return loss.item(), before, whole_tensors(job, lambda p: p)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["one", "fsdp2", "tp2"])
def test_all_parameters_decay_and_nothing_else_happens_to_them_without_a_gradient(
    pool: Pool, name: str, implementation: str
) -> None:
    layout = MESHES[name]
    flags = (*JOB, *layout.command_line(), *DECAY, f"--optimizer.implementation={implementation}")
    for loss, before, after in pool(layout.world_size).run(step_without_labels, flags):
        assert loss == 0.0
        assert len(after) == 21  # 9 in each of 2 layers, embedding, norm and head
        for key, tensor in after.items():
            assert tensor.any(), key
            # one rounding of the factor and one of the product
            assert torch.allclose(tensor, before[key] * (1 - 0.1 * 0.5), rtol=2.5e-7, atol=0), key


# --------------------------------------------------------------------------------------------- learning rate


def learning_rates(flags: tuple[str, ...]) -> list[float]:
    """The change of a weight over its gradient (least squares) in every step of a run with SGD."""
    job, _ = build_job(flags)
    parameter = job.model.get_parameter("layers.0.feed_forward.w1.weight")
    before: list[Tensor] = []
    seen = []

    def record(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        before[:] = [local(parameter).clone(), local(parameter.grad).clone()]

    def compare(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        weight, gradient = (tensor.double() for tensor in before)
        change = weight - local(parameter).double()
        lr = (change * gradient).sum() / gradient.square().sum()
        seen.append(lr.item())

    job.optimizer.register_step_pre_hook(record)
    job.optimizer.register_step_post_hook(compare)
    run(job)
    return seen


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize("name", ["one", "fsdp2"])
def test_the_learning_rate_reported_is_the_one_used_in_that_step(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    layout = MESHES[name]
    flags = (
        *JOB,
        *layout.command_line(),
        *SGD,
        "--lr_scheduler.warmup_steps=4",
        "--lr_scheduler.decay_ratio=0.4",
        "--training.max_norm=inf",
        "--metrics.log_freq=1",
        f"--job.dump_folder={tmp_path}",
    )
    expected = [0.5 * factor for factor in (0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25)]
    for used in pool(layout.world_size).run(learning_rates, flags):
        assert used == pytest.approx(expected, rel=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == expected


def counts(flags: tuple[str, ...]) -> tuple[int, int, int]:
    job, _ = build_job(flags)
    batches = iter(job.loader)
    for _ in range(3):
        train_step(job, batches)
    gradients = [p.grad for p in job.model.parameters()]
    assert gradients == [None] * len(gradients)
    return job.state.step, job.state.samples_seen, job.state.tokens_seen


def test_a_step_counts_the_whole_batch_and_leaves_no_gradient(pool: Pool) -> None:
    layout = MESHES["fsdp2"]
    assert pool(2).run(counts, (*JOB, *layout.command_line(3))) == [(3, 3 * 12, 3 * 12 * 33)] * 2
