"""Ending a run on request: signals, and what they do in each part of a run. Without torch, to hear from the
start.

A thread listens, because a handler of Python's only runs between two instructions of the main thread, which
may stand in a collective for minutes. Signals are heard by the process they are sent to: the children that
load data leave Ctrl-C to it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0
"""A launcher that passes a signal on, beside a scheduler that sends it to every process, means it once."""

logger = logging.getLogger("titanish")


class StopRequests:
    """Signals to this process, and how long it has run.

    Until `defer`, and again after `end_at_once`, a signal ends the process, with exit code 128 + its number.
    In between the first one is kept in `signal` for the end of the step, and a second one ends the process.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._heard_at = 0.0
        self._started = time.monotonic()
        self._deferring = False
        self._deaf = False
        self._when = "before the first step: nothing was trained"

    @property
    def minutes(self) -> float:
        """Minutes since this process started."""
        return (time.monotonic() - self._started) / 60

    @property
    def deferring(self) -> bool:
        """Whether the process is between its first step and its last."""
        return self._deferring

    def defer(self) -> None:
        """From here on a signal waits for the end of the step."""
        self._deferring = True

    def end_at_once(self, when: str) -> None:
        """From here on a signal ends the process; `when` is what the log says of it."""
        self._deferring, self._when = False, when

    def say_last_words(self) -> None:
        """From here on signals are not heard: the process ends by itself, as soon as it has said why."""
        self._deaf = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears signals inside; puts back who heard them before. Only the main thread can."""
        global _listening
        hear, tell = socket.socketpair()
        tell.setblocking(False)
        before = {each: signal.signal(each, _heard_by_the_thread) for each in SIGNALS}
        for each in SIGNALS:
            signal.siginterrupt(each, False)  # no write of a checkpoint is cut short
        previous = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        _listening = True
        thread = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            _listening = False
            signal.set_wakeup_fd(previous)
            for each, handler in before.items():
                signal.signal(each, handler)
            tell.close()  # which ends the thread
            thread.join()
            hear.close()

    def _listen(self, pipe: socket.socket) -> None:
        while number := pipe.recv(1):
            if number[0] in SIGNALS:
                self._receive(signal.Signals(number[0]))

    def _receive(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self._deaf:
            return
        if self.signal is not None:
            if now - self._heard_at >= SAME_REQUEST_SECONDS:
                _end(received, "again: this ends the process at once")
        elif self._deferring:
            self.signal, self._heard_at = received, now
            logger.info(
                f"{received.name}: training stops with this step or the next; a second one ends it at once"
            )
        else:
            _end(received, self._when)


def _end(received: signal.Signals, when: str) -> None:
    logger.info(f"{received.name} {when}")
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        sys.__stderr__.write("\x1b[?25h")  # the cursor, which a progress bar hides
        sys.__stderr__.flush()
    os._exit(128 + received)


def _heard_by_the_thread(number: int, frame: FrameType | None) -> None:
    """Stands for the system's own handler, which would end the process."""


_listening = False


def _forget_in_child() -> None:
    """A forked child must not speak for its parent: it keeps to its work on Ctrl-C, and can be ended."""
    if _listening:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


os.register_at_fork(after_in_child=_forget_in_child)
