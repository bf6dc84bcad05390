"""A progress bar for who watches a terminal; nothing at all where nobody does."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Steps done, the last loss and the time left, on the terminal's last line; log lines pass above it.

    Draws only if standard error is a terminal and this rank is to draw at all (`shown`); without a bar no
    call has any effect.
    """

    def __init__(
        self, total_steps: int, *, start_step: int = 0, shown: bool = True, disable_color: bool = False
    ) -> None:
        self._progress: Progress | None = None
        if not (shown and sys.stderr.isatty()):
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True, no_color=disable_color),
            transient=True,
            # While it is drawn the bar stands in for both streams, and moves below what is written to them.
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=start_step, loss="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Shows that `step` is done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show_loss(self, loss: float) -> None:
        """Shows the loss that was logged last."""
        if self._progress is not None:
            self._progress.update(self._task, loss=f"loss {loss:.4f}")

    def close(self) -> None:
        """Takes the bar away and gives the streams back."""
        if self._progress is not None:
            self._progress.stop()
