"""Which rank writes which files, and the progress bar: there on a terminal, absent elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from titanish.observe.metrics import Row
from titanish.observe.progress import ProgressBar
from titanish.observe.reporter import Reporter, build_reporter
from titanish.runtime.log import setup_logging


@dataclass(frozen=True)
class Metrics:
    log_freq: int = 10
    enable_tensorboard: bool = False
    disable_color_printing: bool = True
    save_tb_folder: str = "tb"
    save_for_all_ranks: bool = False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def attach_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal. No fixture: between setup and test pytest sets the stream anew."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def files(folder: Path) -> list[str]:
    """All files below the folder, the unique part of event files left out."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name.split(".tfevents")[0] if ".tfevents" in name else name for name in names)


def report(
    folder: Path, metrics: Metrics, *, rank: int, resume_step: int | None = None, step: int = 10
) -> None:
    reporter = build_reporter(
        metrics,  # type: ignore[arg-type]  # has the fields of the section
        folder,
        rank=rank,
        is_main=rank == 0,
        resume_step=resume_step,
        total_steps=100,
    )
    reporter.advance(step)
    reporter.log({"step": step, "loss": 1.5})
    reporter.close()


def test_the_main_rank_alone_writes_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        report(tmp_path, Metrics(enable_tensorboard=True), rank=rank)
    assert files(tmp_path) == ["metrics.jsonl", "tb/events.out"]


def test_every_rank_writes_its_own_files_if_asked_to(tmp_path: Path) -> None:
    for rank in (0, 1):
        report(tmp_path, Metrics(enable_tensorboard=True, save_for_all_ranks=True), rank=rank)
    assert files(tmp_path) == [
        "metrics.jsonl",
        "metrics.rank0.jsonl",
        "metrics.rank1.jsonl",
        "tb/events.out",
        "tb/rank0/events.out",
        "tb/rank1/events.out",
    ]


def test_tensorboard_is_written_to_the_folder_named_and_only_if_asked_for(tmp_path: Path) -> None:
    report(tmp_path / "a", Metrics(), rank=0)
    report(tmp_path / "b", Metrics(enable_tensorboard=True, save_tb_folder="events"), rank=0)
    assert files(tmp_path / "a") == ["metrics.jsonl"]
    assert files(tmp_path / "b") == ["events/events.out", "metrics.jsonl"]


def test_a_resumed_run_goes_on_with_the_file_of_the_first(tmp_path: Path) -> None:
    report(tmp_path, Metrics(), rank=0, step=10)
    report(tmp_path, Metrics(), rank=0, step=20, resume_step=10)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20]


def test_all_sinks_are_closed_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    class Failing:
        def write(self, row: Row) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("disk gone")

    with caplog.at_level(logging.WARNING, logger="titanish"):
        Reporter([Failing(), Failing()], ProgressBar(1, shown=False)).close()
    assert len(closed) == 2
    assert caplog.messages == ["Failing: disk gone", "Failing: disk gone"]


def test_there_is_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(10)
    bar.advance(5)
    bar.show_loss(1.0)
    bar.close()
    assert stream.getvalue() == ""
    assert sys.stderr is stream


def test_there_is_no_bar_on_a_rank_that_is_not_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    bar = ProgressBar(10, shown=False)
    bar.advance(5)
    bar.close()
    assert terminal.getvalue() == ""


def test_the_bar_shows_steps_and_loss_and_gives_the_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    bar = ProgressBar(60, start_step=20, disable_color=True)
    bar.advance(30)
    bar.show_loss(2.5)
    bar.close()
    assert "20/60" in terminal.getvalue()
    assert "30/60" in terminal.getvalue()
    assert "loss 2.5000" in terminal.getvalue()
    assert sys.stderr is terminal


def test_a_log_line_stays_whole_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    setup_logging(rank=0, place="dp0", disable_color=True)
    bar = ProgressBar(60, disable_color=True)
    logging.getLogger("titanish").info("validated")
    bar.close()
    lines = [line for line in terminal.getvalue().splitlines() if "validated" in line]
    assert len(lines) == 1
    assert lines[0].endswith("INFO r0 dp0 | validated")
