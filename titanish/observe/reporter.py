"""Brings each logged step to all sinks, and decides which rank has which."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanish.observe.metrics import Row
from titanish.observe.progress import ProgressBar
from titanish.observe.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink

if TYPE_CHECKING:
    from titanish.config.schema import Metrics

logger = logging.getLogger("titanish")


class Reporter:
    """What the loop tells about its steps: `advance` for each, `log` for those that are logged."""

    def __init__(self, sinks: Sequence[Sink], progress: ProgressBar) -> None:
        self._sinks = tuple(sinks)
        self._progress = progress

    def advance(self, step: int) -> None:
        """Shows on a terminal that `step` is done."""
        self._progress.advance(step)

    def log(self, row: Row) -> None:
        """Writes one row to every sink: `step`, which is given once, and its values; all on the host by
        now."""
        loss = row.get("loss")
        if loss is not None:
            self._progress.show_loss(loss)
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Closes every sink, also after one that cannot."""
        self._progress.close()
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:  # it is too late to lose a finished run for it
                logger.warning(f"{type(sink).__name__}: {error}")


def build_reporter(
    metrics: Metrics,
    dump_folder: str | Path,
    *,
    rank: int,
    is_main: bool,
    resume_step: int | None,
    total_steps: int,
) -> Reporter:
    """The reporter of one rank; `resume_step` is the step that the run continues after, None for a fresh run.

    The main rank writes `metrics.jsonl` and, with `metrics.enable_tensorboard`, events under
    `metrics.save_tb_folder`. With `metrics.save_for_all_ranks` every rank writes its own,
    `metrics.rank3.jsonl` and `tb/rank3`, beside. Every rank has the console; which of them show it is the
    log's to decide.
    """
    folder = Path(dump_folder)
    names = ([""] if is_main else []) + ([f"rank{rank}"] if metrics.save_for_all_ranks else [])
    sinks: list[Sink] = [ConsoleSink(total_steps)]
    for name in names:
        sinks.append(JsonlSink(folder / (f"metrics.{name}.jsonl" if name else "metrics.jsonl"), resume_step))
        if metrics.enable_tensorboard:
            sinks.append(TensorBoardSink(folder / metrics.save_tb_folder / name, resume_step))
    progress = ProgressBar(
        total_steps,
        start_step=resume_step or 0,
        shown=is_main,
        disable_color=metrics.disable_color_printing,
    )
    return Reporter(sinks, progress)
