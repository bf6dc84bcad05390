"""The loop around steps, and the words in which two runs that differ are reported."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.layouts import JOB, Layout
from titanish.data.loader import StepBatch
from titanish.runtime.log import setup_logging
from titanish.testing.equality import (
    BITWISE,
    Tolerances,
    Trace,
    build_job,
    compare,
    uneven_labels,
    whole_batches,
)
from titanish.testing.ranks import RankPool
from titanish.train.job import StepResult, TrainState, run

Pool = Callable[[int], RankPool]


@dataclass
class Recorder:
    """A hook that writes down when it is called, and leaves a value for those behind it."""

    name: str
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def before_step(self, state: TrainState, row: dict[str, Any]) -> None:
        self.events.append((self.name, "before", state.step, list(row)))
        row[self.name] = 1

    def after_step(self, state: TrainState, result: StepResult, row: dict[str, Any]) -> None:
        self.events.append((self.name, "after", state.step, list(row)))
        row[self.name] = 1

    def close(self) -> None:
        self.events.append((self.name, "close"))


class Failing:
    def run(self, batch: StepBatch) -> Tensor:
        raise RuntimeError("out of memory")


def events_of_a_run(flags: tuple[str, ...], failing: bool) -> list[tuple[Any, ...]]:
    job, _ = build_job(flags)
    for hook in job.hooks:
        hook.close()
    first = Recorder("first")
    second = Recorder("second", first.events)
    job = dataclasses.replace(job, hooks=[first, second])
    if failing:
        job = dataclasses.replace(job, step=Failing())
        with pytest.raises(RuntimeError, match="out of memory"):
            run(job)
    else:
        run(job)
    return first.events


COMMAND = (*JOB, *Layout().command_line(), "--training.steps=2")


def test_hooks_stand_around_each_step_in_their_order_and_share_a_row(pool: Pool) -> None:
    assert pool(1).run(events_of_a_run, COMMAND, False)[0] == [
        ("first", "before", 0, []),
        ("second", "before", 0, ["first"]),
        ("first", "after", 1, []),
        ("second", "after", 1, ["first"]),
        ("first", "before", 1, []),
        ("second", "before", 1, ["first"]),
        ("first", "after", 2, []),
        ("second", "after", 2, ["first"]),
        ("first", "close"),
        ("second", "close"),
    ]


def test_hooks_are_closed_when_a_step_fails(pool: Pool) -> None:
    events = pool(1).run(events_of_a_run, COMMAND, True)[0]
    assert events[-2:] == [("first", "close"), ("second", "close")]
    assert ("first", "after", 1, []) not in events


# ------------------------------------------------------------------------------------------------ comparison


def recorded(**changes: Any) -> Trace:
    one = {
        "losses": [2.0, 1.0],
        "norms": [4.0, 3.0],
        "initial": {"w": torch.ones(4)},
        "gradients": {"w": torch.full((4,), 2.0)},
        "parameters": {"w": torch.full((4,), 0.5)},
    }
    return Trace(**{**one, **changes})


def test_equal_runs_are_equal_bitwise() -> None:
    assert compare(recorded(), recorded(), BITWISE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"losses": [2.00001, 1.0]},
            ["loss of step 1: 2.0 and 2.00001, 5.0e-06 apart, allowed 1e-06"],
        ),
        (
            {"losses": [2.0, 1.001]},
            ["loss of step 2: 1.0 and 1.001, 1.0e-03 apart, allowed 1e-05"],
        ),
        (
            {"losses": [2.0, float("nan")]},
            ["loss of step 2: 1.0 and nan, nan apart, allowed 1e-05"],
        ),
        (
            {"norms": [4.0004, 3.0]},
            ["gradient norm of step 1: 4.0 and 4.0004, 1.0e-04 apart, allowed 1e-05"],
        ),
        (
            {"norms": [4.0, 3.003]},
            ["gradient norm of step 2: 3.0 and 3.003, 1.0e-03 apart, allowed 2e-04"],
        ),
        (
            {"initial": {"w": torch.full((4,), 1.0 + 2**-23)}},
            ["initial weights of w: 1.2e-07 apart, allowed 0e+00"],
        ),
        (
            {"gradients": {"w": torch.full((4,), 2.002)}},
            ["gradient of w: 1.0e-03 apart, allowed 1e-05"],
        ),
        (
            {"parameters": {"w": torch.full((4,), float("nan"))}},
            ["parameters after step 1 of w: nan apart, allowed 1e-05"],
        ),
        (
            {"gradients": {"v": torch.full((4,), 2.0)}},
            ["gradient: only on one side: ['v', 'w']"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_difference_is_told_in_words(changes: dict[str, Any], words: list[str]) -> None:
    assert compare(recorded(), recorded(**changes)) == words


def test_differences_within_the_tolerances_are_none() -> None:
    other = recorded(losses=[2.000001, 1.000005], gradients={"w": torch.full((4,), 2.00001)})
    assert compare(recorded(), other) == []
    assert len(compare(recorded(), other, BITWISE)) == 4  # the first loss is compared as such and in its row
    assert compare(recorded(), recorded(losses=[3.0, 1.5]), Tolerances(first_loss=1, loss=1)) == []


def test_batches_are_put_together_in_the_order_of_batch_ranks() -> None:
    a, b = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    traces = [
        Trace(tokens=[b], batch_rank=1),
        Trace(tokens=[a], batch_rank=0),
        Trace(tokens=[b.clone()], batch_rank=1),
    ]
    (whole,) = whole_batches(traces)
    assert torch.equal(whole, torch.cat((a, b)))
    traces[2].tokens[0][0, 0] = 9
    with pytest.raises(AssertionError, match="two ranks with batch index 1 read different rows"):
        whole_batches(traces)


def test_uneven_labels_keep_between_one_and_all_by_the_row_alone() -> None:
    tokens = torch.randint(257, (64, 8), generator=torch.Generator().manual_seed(0))
    batch = StepBatch(tokens=tokens, labels=torch.ones(64, 8, dtype=torch.int64))
    cut = uneven_labels(batch)
    kept = (cut["labels"] != -100).sum(dim=1)
    assert set(kept.tolist()) == set(range(1, 9))
    assert (batch["labels"] == 1).all()  # the batch itself is left as it is
    halves = [
        uneven_labels(StepBatch(tokens=tokens[rows], labels=batch["labels"][rows]))["labels"]
        for rows in (slice(32), slice(32, None))
    ]
    assert torch.equal(torch.cat(halves), cut["labels"])


def warnings_of_a_run(flags: tuple[str, ...]) -> list[str]:
    job, _ = build_job(flags)
    heard: list[str] = []
    setup_logging()  # what is logged once is counted from here on
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titanish").addHandler(handler)
    try:
        run(job)
    finally:
        logging.getLogger("titanish").removeHandler(handler)
    return heard


def test_a_loss_that_is_not_finite_is_warned_of_once(pool: Pool) -> None:
    flags = (*COMMAND, "--training.steps=4", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=0")
    assert pool(1).run(warnings_of_a_run, flags)[0] == []
    (warning,) = pool(1).run(warnings_of_a_run, (*flags, "--optimizer.lr=1e30"))[0]
    assert warning.startswith("the loss or the gradient norm is not finite: training has diverged")
