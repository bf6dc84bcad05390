"""What whole jobs note about themselves beside their metrics: events, and what the profiler saw."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.effects.ran import BASE, train
from titanish.testing.ranks import RankPool
from titanish.train.__main__ import main

Pool = Callable[[int], RankPool]
SAVING = ("--checkpoint.enable", "--checkpoint.interval=1")
VALIDATING = ("--validation.enable", "--validation.dataset=mock", "--validation.steps=1")


def events(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "outputs/events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def run(folder: str, *flags: str) -> None:
    train(folder, flags)


def fail(folder: str, *flags: str) -> int:
    run(folder)
    return main([*BASE, *flags])


def test_a_job_notes_its_start_its_saves_its_validation_and_its_resume(pool: Pool, tmp_path: Path) -> None:
    pool(1).run(run, str(tmp_path), *SAVING, *VALIDATING)
    pool(1).run(run, str(tmp_path), *SAVING, "--training.steps=3")
    noted = events(tmp_path)
    assert [(event["kind"], event["step"]) for event in noted if event["kind"] != "warning"] == [
        ("start", 0),
        ("validation", 0),
        ("checkpoint", 1),
        ("validation", 2),
        ("checkpoint", 2),
        ("finish", 2),
        ("resume", 2),
        ("checkpoint", 3),
        ("finish", 3),
    ]
    start = noted[0]
    assert start["world"] == "world 1 = pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 1"
    assert start["batch"].startswith("global batch 12 = 1 batch ranks x 6 local x 2 accumulation")
    saved = next(event for event in noted if event["kind"] == "checkpoint")
    on_disk = (tmp_path / "outputs/checkpoint/step-1").rglob("*")
    assert saved["bytes"] == sum(file.stat().st_size for file in on_disk if file.is_file())
    assert 0 < saved["seconds"] < 60


def test_a_job_notes_why_it_failed(pool: Pool, tmp_path: Path) -> None:
    assert pool(1).run(fail, str(tmp_path), "--checkpoint.enable", "--checkpoint.load_step=7") == [1]
    failure = events(tmp_path)[-1]
    assert failure["kind"] == "failure"
    assert failure["error"].startswith("checkpoint.load_step = 7: ")


def test_a_run_that_diverges_notes_the_warning_at_its_step(pool: Pool, tmp_path: Path) -> None:
    pool(1).run(
        run, str(tmp_path), "--optimizer.lr=1e30", "--training.steps=3", "--lr_scheduler.warmup_steps=0"
    )
    (warning,) = [event for event in events(tmp_path) if "diverged" in event.get("message", "")]
    assert warning["kind"] == "warning"
    assert warning["step"] == 2
