"""A job as a frozen set of parts, and the loop over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from titanish.data.loader import StepBatch, TrainLoader
from titanish.observe.metrics import Row, Throughput
from titanish.optim.build import set_learning_rate
from titanish.optim.clip import clip_gradients
from titanish.optim.schedule import WarmupStableDecay
from titanish.parallel.shards import counted_here
from titanish.train.step import Step


@dataclass
class TrainState:
    """All that changes during training besides tensors; `stop` is why it ends with this step, before its
    last."""

    step: int = 0
    tokens_seen: int = 0
    samples_seen: int = 0
    stop: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device; reading the tensors waits for it.

    `loss_share` is this rank's share of the loss, `grad_norm` the whole gradient's norm before clipping, `lr`
    the learning rate that was used.
    """

    loss_share: Tensor
    grad_norm: Tensor
    lr: float


class Hook(Protocol):
    """Something periodic. `row` collects what is to be reported of the step; the last hook sends it off."""

    def before_step(self, state: TrainState, row: Row) -> None: ...

    def after_step(self, state: TrainState, result: StepResult, row: Row) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """Everything that training needs, put together by `assemble`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: WarmupStableDecay
    step: Step
    loader: TrainLoader
    hooks: Sequence[Hook]
    state: TrainState
    throughput: Throughput
    steps: int
    peak_lr: float
    max_norm: float
    samples_per_step: int
    tokens_per_step: int


def run(job: Job) -> None:
    """Train until `job.steps`, or until a hook sets `stop`; closes hooks and loader, also after an error."""
    try:
        batches = iter(job.loader)
        while job.state.step < job.steps and job.state.stop is None:
            row: Row = {}
            for hook in job.hooks:
                hook.before_step(job.state, row)
            result = train_step(job, batches)
            row = {}
            for hook in job.hooks:
                hook.after_step(job.state, result, row)
    finally:
        for hook in job.hooks:
            hook.close()
        job.loader.close()


def train_step(job: Job, batches: Iterator[StepBatch]) -> StepResult:
    """One optimizer step on the next batch; advances `job.state`."""
    with job.throughput.data_wait():
        batch = next(batches)
    loss_share = job.step.run(batch)
    result = update(job, loss_share)
    job.throughput.step(job.tokens_per_step)
    return result


def update(job: Job, loss_share: Tensor) -> StepResult:
    """Clip the gradients, step the optimizer, clear the gradients and count."""
    grad_norm = clip_gradients(job.model.parameters(), job.max_norm, counted_here)
    lr = job.peak_lr * job.schedule.factor(job.state.step + 1)
    set_learning_rate(job.optimizer, lr)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.state.step += 1
    job.state.samples_seen += job.samples_per_step
    job.state.tokens_seen += job.tokens_per_step
    return StepResult(loss_share, grad_norm, lr)
