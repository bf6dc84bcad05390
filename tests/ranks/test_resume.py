"""Killed and resumed equals never stopped: bitwise on the same mesh, the same batches on any other."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.ranks.layouts import ADAMW, JOB, LAYOUTS, Layout
from titanish.data.loader import StepBatch
from titanish.testing.equality import Trace, build_job, whole_batches, whole_tensors
from titanish.testing.ranks import RankFailure, RankPool
from titanish.train.job import run

Pool = Callable[[int], RankPool]
CHECKPOINTS = ("--checkpoint.enable", "--checkpoint.interval=5", "--metrics.log_freq=1")


def train(flags: Sequence[str], kill_in_step: int | None = None) -> Trace:
    """Run the job to its end, or until this process is killed; its tokens and its last parameters."""
    job, batch_rank = build_job(flags)
    record = Trace(batch_rank=batch_rank)
    forward_backward = type(job.step).run

    def watched(step: Any, batch: StepBatch) -> Tensor:
        if job.state.step + 1 == kill_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        record.tokens.append(batch["tokens"])
        return forward_backward(step, batch)

    with patch.object(type(job.step), "run", watched):
        run(job)
    record.parameters = whole_tensors(job, lambda p: p)
    return record


def history(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every row that a run left."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


def check_killed_and_resumed(ranks: RankPool, tmp_path: Path, command: tuple[str, ...]) -> None:
    """12 steps equal 5 steps, kill -9 in step 8, and 7 steps by other processes."""
    whole, stopped = (f"--job.dump_folder={tmp_path / name}" for name in ("whole", "stopped"))
    expected = ranks.run(train, (*command, whole))[0]
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks.run(train, (*command, stopped), kill_in_step=8)
    resumed = ranks.run(train, (*command, stopped))[0]
    assert len(resumed.tokens) == 7
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")
    assert [step for step, *_ in history(tmp_path / "stopped")] == list(range(1, 13))
    for name, parameter in expected.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


@pytest.mark.parametrize("name", ["one", "fsdp2", "tp2", "fsdp2-tp2"])
def test_killed_and_resumed_is_bitwise_uninterrupted(pool: Pool, tmp_path: Path, name: str) -> None:
    layout = {"one": Layout(), **LAYOUTS}[name]
    command = (*JOB, *layout.command_line(3), *ADAMW, *CHECKPOINTS, "--training.steps=12")
    check_killed_and_resumed(pool(layout.world_size), tmp_path, command)


def test_killed_and_resumed_with_workers_is_bitwise_uninterrupted(pool: Pool, tmp_path: Path) -> None:
    workers = ("--training.dataloader.num_workers=2", "--training.steps=12")
    command = (*JOB, *Layout().command_line(3), *ADAMW, *CHECKPOINTS, *workers)
    check_killed_and_resumed(pool(1), tmp_path, command)


@pytest.fixture(scope="module")
def two_ranks(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trace]]:
    """A folder with a checkpoint of step 5, and 12 steps without a stop, both on two FSDP ranks."""
    folder = tmp_path_factory.mktemp("two")
    command = (*JOB, *LAYOUTS["fsdp2"].command_line(), *ADAMW, *CHECKPOINTS, "--lr_scheduler.total_steps=12")
    pool(2).run(train, (*command, "--training.steps=5", f"--job.dump_folder={folder}/five"))
    whole = (*command, "--training.steps=12", f"--job.dump_folder={folder}/twelve")
    return folder, pool(2).run(train, whole)


@pytest.mark.parametrize("name", ["one", "fsdp4", "tp2"])
def test_resume_on_another_mesh_goes_on_with_the_same_batches(
    pool: Pool, tmp_path: Path, two_ranks: tuple[Path, list[Trace]], name: str
) -> None:
    folder, expected = two_ranks
    shutil.copytree(folder / "five", tmp_path, dirs_exist_ok=True)
    layout = {"one": Layout(), **LAYOUTS}[name]
    flags = ("--lr_scheduler.total_steps=12", "--training.steps=12", f"--job.dump_folder={tmp_path}")
    command = (*JOB, *layout.command_line(), *ADAMW, *CHECKPOINTS, *flags)
    resumed = pool(layout.world_size).run(train, command)
    for ours, theirs in zip(whole_batches(resumed), whole_batches(expected)[5:], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(history(tmp_path), history(folder / "twelve"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)  # gradient norms; see `Tolerances`
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
