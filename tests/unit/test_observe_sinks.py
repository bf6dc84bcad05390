"""What each sink makes of a row, and that stopping and resuming a run repeats no step in any of them."""

from __future__ import annotations

import builtins
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest

from titanish.errors import TitanishError
from titanish.observe.metrics import Row
from titanish.observe.sinks import ConsoleSink, JsonlSink, TensorBoardSink, to_json


def row(step: int, **values: float | int | None) -> Row:
    return {"step": step, **values}


def write(path: Path, resume_step: int | None, *rows: Row) -> None:
    sink = JsonlSink(path, resume_step)
    for each in rows:
        sink.write(each)
    sink.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- console


def test_console_line_shows_known_values_with_their_units() -> None:
    line = ConsoleSink(total_steps=600).line(
        row(
            20,
            loss=3.21004,
            grad_norm=1.5,
            lr=3e-4,
            tokens_seen=1_000_000,
            tokens_per_second=12345.6,
            step_seconds=0.5,
            data_wait_fraction=0.02,
            memory_gib=0.514,
            model_flops_per_second=1e9,
            mfu=0.414,
        )
    )
    assert line == (
        "step 20/600  loss 3.2100  grad norm 1.5000  lr 3.000e-04  12,346 tokens/s  0.51 GiB  mfu 41.4%  "
        "data wait 2%  eta 0:04:50"
    )


def test_console_line_says_what_is_not_known() -> None:
    assert ConsoleSink(5).line(row(5, loss=1.0, mfu=None)) == "step 5/5  loss 1.0000  mfu n/a"


def test_console_line_of_a_validation_before_the_first_step() -> None:
    assert ConsoleSink(600).line(row(0, validation_loss=5.7012)) == "step 0/600  validation loss 5.7012"


def test_console_line_shows_what_features_add_by_name() -> None:
    line = ConsoleSink(9).line(row(1, loss=1.0, expert_load_max_over_mean=1.375))
    assert line == "step 1/9  loss 1.0000  expert_load_max_over_mean 1.375"


def test_console_line_survives_a_loss_that_is_not_a_number() -> None:
    assert (
        ConsoleSink(9).line(row(1, loss=math.nan, grad_norm=math.inf)) == "step 1/9  loss nan  grad norm inf"
    )


def test_console_rows_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="titanish"):
        ConsoleSink(9).write(row(1, loss=1.0))
    assert caplog.messages == ["step 1/9  loss 1.0000"]


# ------------------------------------------------------------------------------------------------------ JSONL


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    written = row(1, loss=0.1 + 0.2, lr=1e-323, tokens_seen=2**60 + 1, mfu=None)
    write(tmp_path / "metrics.jsonl", None, written)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == written


def test_values_that_are_not_finite_are_null_and_named() -> None:
    def no_constant(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    text = to_json(row(1, loss=math.nan, grad_norm=-math.inf, lr=0.5))
    assert json.loads(text, parse_constant=no_constant) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
        "nonfinite": {"loss": "nan", "grad_norm": "-inf"},
    }


def test_a_row_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    sink.write(row(1))
    assert steps(tmp_path / "metrics.jsonl") == [1]
    sink.close()


def test_a_fresh_run_moves_older_files_aside(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2, 3):
        write(path, None, row(step))
    assert steps(path) == [3]
    assert steps(path.with_name("metrics.1.jsonl")) == [1]
    assert steps(path.with_name("metrics.2.jsonl")) == [2]


def test_a_resumed_run_repeats_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, None, *(row(step, loss=1.0) for step in (0, 10, 20, 30, 40)))
    with caplog.at_level(logging.INFO, logger="titanish"):
        write(path, 20, row(30, loss=2.0))
    assert steps(path) == [0, 10, 20, 30]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 2.0
    assert caplog.messages == [f"{path}: cut 2 line(s) past step 20, where this run resumes"]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", ['{"step": 20, "loss": 1.', "{", '"step"', '{"loss": 1.0}\n', "\x00\x00\x00"], ids=repr
)
def test_a_resumed_run_cuts_what_a_kill_left_unfinished(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n' + torn)
    write(path, 20, row(30))
    assert steps(path) == [10, 30]


def test_a_last_row_that_only_lacks_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}')
    write(path, 20, row(30))
    assert steps(path) == [10, 20, 30]


def test_a_file_that_needs_no_cut_is_only_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, None, row(10), row(20))
    inode = path.stat().st_ino
    write(path, 20, row(30))
    assert steps(path) == [10, 20, 30]
    assert path.stat().st_ino == inode


def test_a_run_resumed_elsewhere_begins_a_file(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 20, row(30))
    assert steps(tmp_path / "metrics.jsonl") == [30]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        TitanishError, match=r"cannot write the metrics to .*file/metrics\.jsonl: .*job\.dump_folder"
    ):
        JsonlSink(tmp_path / "file" / "metrics.jsonl", None)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")  # takes nothing
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: full)
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    expected = (
        r"cannot write the metrics to .*metrics\.jsonl: No space left on device; make room or set job\.dump"
    )
    with pytest.raises(TitanishError, match=expected):
        sink.write(row(1))
    with pytest.raises(OSError, match="No space left"):
        sink.close()


# ------------------------------------------------------------------------------------------------ TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def write_events(folder: Path, resume_step: int | None, *rows: Row) -> None:
    sink = TensorBoardSink(folder, resume_step)
    for each in rows:
        sink.write(each)
    sink.close()


def test_events_have_the_names_and_steps_of_the_rows(tmp_path: Path) -> None:
    write_events(tmp_path, None, row(0, validation_loss=5.5), row(10, loss=2.5, mfu=None, tokens_seen=640))
    assert scalars(tmp_path, "validation_loss") == [(0, 5.5)]
    assert scalars(tmp_path, "loss") == [(10, 2.5)]
    assert scalars(tmp_path, "tokens_seen") == [(10, 640)]
    with pytest.raises(KeyError):
        scalars(tmp_path, "mfu")
    assert len(list(tmp_path.iterdir())) == 1


def test_events_of_a_resumed_run_replace_those_it_repeats(tmp_path: Path) -> None:
    write_events(tmp_path, None, *(row(step, loss=1.0) for step in (10, 20, 30, 40)))
    write_events(tmp_path, 20, row(30, loss=2.0))
    assert scalars(tmp_path, "loss") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_events_of_a_fresh_run_stand_alone(tmp_path: Path) -> None:
    write_events(tmp_path / "tb", None, row(10, loss=1.0), row(20, loss=1.0))
    write_events(tmp_path / "tb", None, row(10, loss=2.0))
    assert scalars(tmp_path / "tb", "loss") == [(10, 2.0)]
    assert scalars(tmp_path / "tb.1", "loss") == [(10, 1.0), (20, 1.0)]


def test_without_tensorboard_the_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError("No module named 'tensorboard'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    expected = (
        r"metrics\.enable_tensorboard = true needs the package tensorboard \(No module named .*\); install it"
    )
    with pytest.raises(TitanishError, match=expected):
        TensorBoardSink(tmp_path, None)


def test_an_event_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("")
    with pytest.raises(
        TitanishError, match=r"cannot write TensorBoard events to .*tb: .*metrics\.save_tb_folder"
    ):
        TensorBoardSink(tmp_path / "tb", None)
