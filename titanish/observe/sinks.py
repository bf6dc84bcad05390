"""Where the rows of logged steps go: the log, `metrics.jsonl`, TensorBoard.

A sink takes one row per logged step and writes it at once, so that what a killed run has logged is there.
Values have the same names everywhere. A step is in each sink once, however often a run is stopped and
resumed.
"""

from __future__ import annotations

import json
import logging
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from titanish.errors import TitanishError
from titanish.observe.metrics import Row

logger = logging.getLogger("titanish")

# How the console shows the values it knows, in this order; it shows others by name, and these not at all:
CONSOLE_FORMATS = {
    "loss": "loss {:.4f}",
    "validation_loss": "validation loss {:.4f}",
    "grad_norm": "grad norm {:.4f}",
    "lr": "lr {:.3e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "memory_gib": "{:.2f} GiB",
    "mfu": "mfu {:.1%}",
    "data_wait_fraction": "data wait {:.0%}",
}
CONSOLE_LEAVES_OUT = ("step", "tokens_seen", "step_seconds", "model_flops_per_second")


class Sink(Protocol):
    """A place that rows are written to."""

    def write(self, row: Row) -> None:
        """Writes the row of one logged step."""
        ...

    def close(self) -> None:
        """Finishes what was written; nothing may be written after."""
        ...


class ConsoleSink:
    """One readable log line per row; as with every line of the log, LOG_RANK says which ranks show theirs."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def write(self, row: Row) -> None:
        logger.info(self.line(row))

    def close(self) -> None:
        """There is nothing to finish."""

    def line(self, row: Row) -> str:
        """The row as text, with the time that the rest of the run will take at the speed of this step."""
        parts = [f"step {row['step']}/{self._total_steps}"]
        for name in (*CONSOLE_FORMATS, *sorted(row.keys() - CONSOLE_FORMATS.keys())):
            if name in row and name not in CONSOLE_LEAVES_OUT:
                value = row[name]
                known = CONSOLE_FORMATS.get(name, name + " {:.5g}")
                parts.append(f"{name} n/a" if value is None else known.format(value))
        step, seconds = row["step"], row.get("step_seconds")
        if step is not None and seconds is not None:
            parts.append(f"eta {timedelta(seconds=round(seconds * max(self._total_steps - step, 0)))}")
        return "  ".join(parts)


class JsonlSink:
    """One JSON object per row, its numbers at full precision, each written before the next step begins.

    JSON has no infinity and no NaN: such a value is null, and `nonfinite` names it and says which it was.

    A fresh run (`resume_step` None) moves a file that is there to `metrics.1.jsonl`, `metrics.2.jsonl` and so
    on. A run that resumed after `resume_step` goes on with it: later rows, whose steps are about to be
    repeated, are cut, and so is a line that the end of the last run left unfinished.

    Raises:
        TitanishError: the file cannot be made, read or written.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _move_aside(path)
            else:
                _cut(path, resume_step)
            self._file = path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, row: Row) -> None:
        try:
            self._file.write(to_json(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> TitanishError:
        return TitanishError(
            f"cannot write the metrics to {self._path}: {error.strerror or error}; "
            "make room or set job.dump_folder to a folder that can be written to"
        )


class TensorBoardSink:
    """TensorBoard scalars of the same names, in one event file per run.

    `resume_step` is the step that this run continues after: what it has repeated is not shown any more. A
    fresh run (None) moves the events of an earlier one aside.

    Raises:
        TitanishError: the package tensorboard is not installed, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        self._folder = folder
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TitanishError(
                f"metrics.enable_tensorboard = true needs the package tensorboard ({error}); "
                "install it, or set the key to false"
            ) from error
        try:
            if resume_step is None:
                _move_events_aside(folder)
            purge_step = 0 if resume_step is None else resume_step + 1
            self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, row: Row) -> None:
        try:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, row["step"])
            self._writer.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._writer.close()

    def _cannot_write(self, error: OSError) -> TitanishError:
        return TitanishError(
            f"cannot write TensorBoard events to {self._folder}: {error.strerror or error}; "
            "set job.dump_folder or metrics.save_tb_folder to a folder that can be written to"
        )


def to_json(row: Row) -> str:
    """The row as one line of JSON; see `JsonlSink` for values that are not finite."""
    nonfinite = {
        name: str(value) for name, value in row.items() if value is not None and not math.isfinite(value)
    }
    values: dict[str, Any] = {name: None if name in nonfinite else value for name, value in row.items()}
    if nonfinite:
        values["nonfinite"] = nonfinite
    return json.dumps(values, allow_nan=False)


def _move_aside(path: Path) -> None:
    """Renames the file, if it is there, to the first free numbered name beside it."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    logger.info(f"{path} of an earlier run is now {aside.name}")


def _move_events_aside(folder: Path) -> None:
    """Moves event files, but not folders of other ranks, to the first free numbered folder beside theirs."""
    events = sorted(folder.glob("events.out.tfevents.*"))
    if not events:
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for path in events:
        path.rename(aside / path.name)
    logger.info(f"events of an earlier run in {folder} are now in {aside.name}")


def _cut(path: Path, resume_step: int) -> None:
    """Removes rows of steps after `resume_step`, and lines that are not rows; replaces the file as a
    whole."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines(keepends=True)
    kept = [line.rstrip("\n") + "\n" for line in lines if _belongs(line, resume_step)]
    if "".join(kept) == text:
        return
    new = path.with_name(path.name + ".new")
    new.write_text("".join(kept), encoding="utf-8", newline="\n")
    os.replace(new, path)
    logger.info(
        f"{path}: cut {len(lines) - len(kept)} line(s) past step {resume_step}, where this run resumes"
    )


def _belongs(line: str, resume_step: int) -> bool:
    """Whether the line is a whole row, of a step up to `resume_step`."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int) and step <= resume_step
