"""The diary of a run: one object per line, warnings of the log among them, and never a reason to fail."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from titanish.observe.events import Events

logger = logging.getLogger("titanish")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_line_with_time_kind_step_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Events(path)
    events.add("checkpoint", 20, seconds=1.5, bytes=123)
    (event,) = lines(path)  # written at once
    events.close()
    assert datetime.fromisoformat(event.pop("time")).utcoffset() == timedelta(0)
    assert event == {"kind": "checkpoint", "step": 20, "seconds": 1.5, "bytes": 123}


def test_a_later_run_adds_to_the_file(tmp_path: Path) -> None:
    for step in (0, 20):
        events = Events(tmp_path / "events.jsonl")
        events.add("start", step)
        events.close()
    assert [event["step"] for event in lines(tmp_path / "events.jsonl")] == [0, 20]


def test_warnings_of_the_log_are_events_of_the_step_until_the_diary_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Events(path)
    events.step = 7
    logger.info("nothing to note")
    logger.warning("the disk is %s", "slow")
    events.close()
    logger.warning("after the run")
    assert [(e["kind"], e["step"], e["message"]) for e in lines(path)] == [("warning", 7, "the disk is slow")]


def test_numbers_that_json_lacks_are_told_in_words(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.add("validation", 1, loss=float("nan"))
    events.close()
    assert lines(tmp_path / "events.jsonl")[0]["loss"] == "nan"


def test_a_diary_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events(tmp_path)
    events.add("start", 0)
    events.add("finish", 1)
    events.close()
    assert caplog.messages == [f"{tmp_path} cannot be written: Is a directory; no more events are noted"]


def test_a_rank_without_a_diary_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = Events()
    events.add("start", 0)
    logger.warning("heard by nobody")
    events.close()
    assert list(tmp_path.iterdir()) == []
