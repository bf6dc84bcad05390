"""What happens to a run besides its steps, one JSON object per line of `events.jsonl`.

`time` (UTC), `kind` and `step` (the last one that was finished) stand in each, and what the kind adds:

| kind | fields |
|---|---|
| `start`, `resume` | `world`, `batch`, `model`, `device`, `steps`, `titanish`, `torch` |
| `validation` | `loss`, `seconds` |
| `checkpoint` | `seconds`, `bytes` |
| `profile` | `path` |
| `warning` | `message` |
| `stop` | `reason` |
| `failure` | `error` |
| `finish` | |

The file is only ever added to: a `start` begins a new run of the folder, a `resume` continues the last one.
A run that was killed left no word at its end.
"""

from __future__ import annotations

import json
import logging
import math
from datetime import datetime, timezone
from pathlib import Path

logger = logging.getLogger("titanish")

Value = str | int | float | None


class Events:
    """The diary of one run; that of a rank which writes none has no `path`.

    From its opening to its closing every warning of the log is an event too. A diary that cannot be written
    is a warning and never an error: it would hide what it was to tell.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.step = 0
        """The last step that was finished: where warnings are placed."""
        self._path = path
        self._handler = _Warnings(self)
        if path is not None:
            logger.addHandler(self._handler)

    def add(self, kind: str, step: int, **fields: Value) -> None:
        """Writes one event, at once, so that it is there whatever comes next."""
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        event = {"time": now, "kind": kind, "step": step, **fields}
        text = json.dumps({name: _plain(value) for name, value in event.items()}, allow_nan=False)
        try:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(text + "\n")
        except OSError as error:
            path, self._path = self._path, None  # first: this warning is no event
            logger.warning(f"{path} cannot be written: {error.strerror or error}; no more events are noted")

    def close(self) -> None:
        """Stops listening to the log; events may still be added."""
        logger.removeHandler(self._handler)


class _Warnings(logging.Handler):
    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.add("warning", self._events.step, message=record.getMessage())


def _plain(value: Value) -> Value:
    """JSON has no infinity and no NaN: such a number is told in words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
