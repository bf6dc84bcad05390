"""One logger, "titanish", whose every line says when, how serious, which rank and where in the mesh.

    12:00:01 INFO r5 dp0 tp1 | step 20/600 ...

Information comes from the ranks in the variable LOG_RANK only (a comma separated list, default 0); warnings
and errors from all. A record is one write, so that ranks that share a terminal do not cut each other's lines.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from typing import TextIO

from titanish.errors import TitanishError

LOGGER_NAME = "titanish"
COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
DIM, RESET = "\x1b[2m", "\x1b[0m"

_logger = logging.getLogger(LOGGER_NAME)
_logged_once: set[str] = set()


class LineFormatter(logging.Formatter):
    """Puts time, level, rank and place before every line of a message, also of one with several lines."""

    def __init__(self, rank: int, place: str, disable_color: bool) -> None:
        super().__init__()
        self.rank = rank
        self.place = place
        self.disable_color = disable_color

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return self.lines(record.levelname, record.created, text)

    def lines(self, level: str, created: float, text: str) -> str:
        """`text` with the prefix before each of its lines, coloured if standard error is a terminal."""
        clock = time.strftime("%H:%M:%S", time.localtime(created))
        prefix = f"{clock} {level} {' '.join(filter(None, (f'r{self.rank}', self.place)))} |"
        if self._coloured():
            prefix = f"{COLOURS.get(level, DIM)}{prefix}{RESET}"
        return "\n".join(f"{prefix} {line}".rstrip() for line in text.splitlines() or [""])

    def _coloured(self) -> bool:
        return not self.disable_color and "NO_COLOR" not in os.environ and sys.stderr.isatty()


class StderrHandler(logging.Handler):
    """Writes to what standard error is at the time: a progress bar replaces it, to stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(sys.stderr, self.format(record))
        except Exception:
            self.handleError(record)


_formatter = LineFormatter(rank=0, place="", disable_color=False)


def setup_logging(rank: int = 0, place: str = "", *, disable_color: bool = False) -> None:
    """Sends the logger "titanish" to standard error in this module's format; may be called again to change
    it.

    Raises:
        TitanishError: LOG_RANK is not a list of ranks.
    """
    informs = rank in _informing_ranks()
    _formatter.rank, _formatter.place, _formatter.disable_color = rank, place, disable_color
    handler = StderrHandler(logging.INFO if informs else logging.WARNING)
    handler.setFormatter(_formatter)
    _logger.handlers[:] = [handler]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False  # a library that configures the root logger would print every line again
    _logged_once.clear()


def set_place(place: str) -> None:
    """Sets where this rank is in the mesh, "dp0 tp1" for example, once the mesh is known."""
    _formatter.place = place


def log_once(message: str, level: int = logging.INFO) -> None:
    """Logs `message` the first time that it is given since `setup_logging`."""
    if message not in _logged_once:
        _logged_once.add(message)
        _logger.log(level, message)


def report_failure(error: BaseException) -> None:
    """Writes the error that ends this process to standard error, as one block with rank and place on every
    line.

    A `TitanishError` is its message, which says what to change; any other error comes with its traceback.
    Works before `setup_logging` too.
    """
    known = isinstance(error, TitanishError)
    text = str(error) if known else "".join(traceback.format_exception(error)).rstrip()
    _write(sys.stderr, _formatter.lines("ERROR", time.time(), text))


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def _informing_ranks() -> set[int]:
    text = os.environ.get("LOG_RANK", "0")
    ranks = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in ranks):
        raise TitanishError(f'LOG_RANK = {text!r}: must be ranks separated by commas, as in LOG_RANK="0,3"')
    return {int(part) for part in ranks}
