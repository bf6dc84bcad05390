"""Runs that are stopped, that fail while saving, or that meet a number which is not finite, over ranks."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import titanish.train.job
import titanish.train.step
from tests.effects.ran import BASE
from tests.ranks.layouts import SGD
from titanish.checkpoint.manager import CheckpointManager
from titanish.runtime.agreement import Agreement
from titanish.testing.equality import BITWISE, compare, trace
from titanish.testing.ranks import RankPool
from titanish.train.__main__ import main

Pool = Callable[[int], RankPool]
SAVING = ("--checkpoint.enable", "--checkpoint.interval=100", "--training.steps=9", "--metrics.log_freq=100")


def run_main(folder: str, flags: Sequence[str]) -> tuple[int, str]:
    """The exit code of a job in `folder`, and what this rank wrote to standard error."""
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        code = main([*BASE, *flags])
    return code, stream.getvalue()


@contextlib.contextmanager
def before_update(step: int, rank: int, action: Callable[[Any], None]) -> Iterator[None]:
    """Has `rank` do `action` in the middle of `step`."""
    update = titanish.train.job.update

    def updated(job: Any, *args: Any) -> Any:
        if job.state.step == step - 1 and dist.get_rank() == rank:
            action(job)
        return update(job, *args)

    with patch.object(titanish.train.job, "update", updated):
        yield


# ---------------------------------------------------------------------------------------------------- stopped


def signalled(folder: str, number: int, rank: int) -> tuple[int, str]:
    def send(job: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # until the thread has heard it

    with before_update(3, rank, send):
        return run_main(folder, SAVING)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_one_rank_stops_all_after_the_next_step_with_a_checkpoint(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    answers = pool(2).run(signalled, str(tmp_path), int(signal.Signals[name]), 1)
    assert [code for code, _ in answers] == [0, 0]
    log = answers[0][1]
    assert (
        f"WARNING r0 dp0 | {name} on rank 1: training stops after step 4; a checkpoint of it is saved" in log
    )
    assert (
        "the same command goes on from step 4, the last complete checkpoint (outputs/checkpoint/step-4)"
        in log
    )
    assert os.listdir(tmp_path / "outputs/checkpoint") == ["step-4"]
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "outputs/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 4]
    events = [json.loads(line) for line in (tmp_path / "outputs/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events if event["kind"] != "warning"] == [
        ("start", 0), ("stop", 4), ("checkpoint", 4),
    ]  # fmt: skip
    assert events[1 if events[1]["kind"] == "stop" else 2]["reason"] == f"{name} on rank 1"
    (code, log), _ = pool(2).run(run_main, str(tmp_path), SAVING)
    assert code == 0
    assert "resumed from step 4" in log
    assert "step 9/9" in log


def test_one_rank_stops_with_the_step_and_says_that_nothing_is_saved(pool: Pool, tmp_path: Path) -> None:
    ((code, log),) = pool(1).run(signalled_without_saving, str(tmp_path))
    assert code == 0
    assert "SIGTERM on rank 0: training stops after step 3; checkpoint.enable is off: nothing is saved" in log
    assert "starts at step 0: checkpoint.enable is off, and nothing was saved" in log
    assert "sampled" not in log


def signalled_without_saving(folder: str) -> tuple[int, str]:
    def send(job: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    with before_update(3, 0, send):
        return run_main(folder, ("--training.steps=9", "--sample.enable"))


def test_the_clock_of_rank_0_stops_all(pool: Pool, tmp_path: Path) -> None:
    flags = (*SAVING, "--training.max_minutes=1e-5")
    (code, log), (other_code, _) = pool(2).run(run_main, str(tmp_path), flags)
    assert (code, other_code) == (0, 0)
    assert "training.max_minutes = 1e-05 are over: training stops after step 2" in log
    assert os.listdir(tmp_path / "outputs/checkpoint") == ["step-2"]


def exchanged(numbers: Sequence[Sequence[int]]) -> tuple[list[int], float]:
    """What is agreed on in each call, and how long this rank took for all but the last."""
    agreement = Agreement()
    agreed = [agreement.exchange(0)]
    dist.barrier()
    start = time.perf_counter()
    agreed += [agreement.exchange(numbers[0][dist.get_rank()])]
    took = time.perf_counter() - start
    if dist.get_rank() == 1:
        time.sleep(0.5)
    agreed += [agreement.exchange(each[dist.get_rank()]) for each in numbers[1:]]
    dist.barrier()
    return agreed, took


def test_ranks_agree_on_the_largest_number_one_call_late_and_do_not_wait_for_the_latest(pool: Pool) -> None:
    (agreed, took), (same, _) = pool(2).run(exchanged, [(3, 0), (0, 7), (1, 2), (0, 0)])
    assert agreed == same == [0, 0, 3, 7, 2]
    assert took < 0.4


# --------------------------------------------------------------------------------------------- a failing save


def full_disk(folder: str) -> tuple[int, str]:
    """A job whose rank 1 can write no large file any more when step 2 is saved."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = CheckpointManager.save

    def limited(self: CheckpointManager, model: Any, optimizer: Any, progress: Any) -> None:
        if progress.step == 2 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        save(self, model, optimizer, progress)

    try:
        with patch.object(CheckpointManager, "save", limited):
            return run_main(folder, ("--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=3"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_and_the_next_goes_on_from_the_last_complete_step(
    pool: Pool, tmp_path: Path
) -> None:
    (code, log), (other_code, _) = pool(2).run(full_disk, str(tmp_path))
    assert (code, other_code) == (1, 1)
    first, *_, last = [line for line in log.splitlines() if " ERROR r0 dp0 | " in line]
    assert (
        "the checkpoint of step 2 could not be written to outputs/checkpoint/.partial-step-2: rank 1: "
        in first
    )
    assert "File too large" in first
    assert last.endswith("| the same command goes on from step 1, the last complete checkpoint "
                         "(outputs/checkpoint/step-1)")  # fmt: skip
    (code, log), _ = pool(2).run(
        run_main, str(tmp_path), ("--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=3")
    )
    assert code == 0
    assert "resumed from step 1" in log


# ------------------------------------------------------------------------------------------- debug: anomalies

ANOMALY = ("--debug.detect_anomaly", "--training.steps=4", "--lr_scheduler.warmup_steps=0")


def spoil_weight(folder: str, rank: int) -> tuple[int, str]:
    """A weight that only `rank` holds becomes NaN in step 2."""

    def spoil(job: Any) -> None:
        with torch.no_grad():
            job.model.get_parameter("layers.0.attention.wq.weight").to_local().fill_(math.nan)

    with before_update(2, rank, spoil):
        return run_main(folder, (*ANOMALY, "--checkpoint.enable", "--checkpoint.interval=1"))


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_rank(pool: Pool, tmp_path: Path) -> None:
    (code, log), (other_code, other) = pool(2).run(spoil_weight, str(tmp_path), 1)
    assert (code, other_code) == (1, 1)
    text = "the loss is nan in this rank's batch, before any backward pass (debug.detect_anomaly)"
    assert f"step 3, rank 0: {text}" in log
    assert f"step 3, rank 1: {text}" in other
    assert "Traceback" not in log


class _Spoiled(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * math.nan


def spoil_gradient(folder: str) -> tuple[int, str]:
    def spoiled(job: Any) -> None:
        job.model.layers["1"].register_forward_hook(lambda module, args, out: _Spoiled.apply(out))

    with before_update(1, 0, spoiled):
        return run_main(folder, ANOMALY)


def test_a_gradient_that_is_not_finite_names_the_operation_step_and_rank(pool: Pool, tmp_path: Path) -> None:
    ((code, log),) = pool(1).run(spoil_gradient, str(tmp_path))
    assert code == 1
    assert "step 2, rank 0: Function '_SpoiledBackward' returned nan values in its 0th output." in log
    assert "shows the line of the forward pass that it belongs to (debug.detect_anomaly)" in log
    assert "Traceback of forward call" in log
    assert "Traceback (most recent call last)" not in log


def huge_norm(folder: str) -> tuple[int, str]:
    with before_update(2, 0, lambda job: job.model.get_parameter("norm.weight").grad.mul_(math.inf)):
        return run_main(folder, (*ANOMALY, "--checkpoint.enable", "--checkpoint.interval=1"))


def test_a_gradient_norm_that_is_not_finite_ends_the_run_before_it_is_saved(
    pool: Pool, tmp_path: Path
) -> None:
    ((code, log),) = pool(1).run(huge_norm, str(tmp_path))
    assert code == 1
    assert "step 2: the gradient norm is inf on all ranks, though no operation of a backward pass" in log
    assert "goes on from step 1, the last complete checkpoint" in log


def test_anomaly_mode_changes_no_number(pool: Pool) -> None:
    flags = [flag for flag in BASE if "dump_folder" not in flag]
    plain = pool(2).run(trace, flags, 2)[0]
    watched = pool(2).run(trace, [*flags, "--debug.detect_anomaly"], 2)[0]
    assert compare(plain, watched, BITWISE) == []


# ----------------------------------------------------------------------------------------- debug: determinism


def test_two_deterministic_runs_are_equal_bitwise(pool: Pool) -> None:
    flags = [*BASE, *SGD, "--debug.deterministic", "--activation_checkpoint.mode=full"]
    runs = [pool(2).run(trace, flags, 3)[0] for _ in range(2)]
    assert compare(*runs, BITWISE) == []
    assert runs[0].losses[0] != runs[0].losses[2]
