"""Signals: what they do before, between and after the steps of training, and in the children of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from titanish.runtime import stop
from titanish.runtime.stop import SIGNALS, StopRequests

PRELUDE = """
import logging, os, signal, time
from titanish.runtime.log import setup_logging
from titanish.runtime.stop import StopRequests
setup_logging()
requests = StopRequests()
def send(number):
    os.kill(os.getpid(), number)
    time.sleep(5)
"""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PRELUDE + text], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("number", SIGNALS)
def test_between_first_and_last_step_a_signal_is_kept_for_the_end_of_the_step(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    requests = StopRequests()
    with caplog.at_level("INFO", logger="titanish"), requests.listening():
        requests.defer()
        os.kill(os.getpid(), number)
        wait_until(lambda: requests.signal)
    assert requests.signal == number
    wait_until(
        lambda: f"{number.name}: training stops with this step or the next; a second one" in caplog.text
    )
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_before_the_first_step_a_signal_ends_the_process_whatever_it_waits_for() -> None:
    done = script("with requests.listening(): send(signal.SIGTERM)")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.rstrip().endswith("INFO r0 | SIGTERM before the first step: nothing was trained")


def test_after_the_last_step_a_signal_ends_the_process() -> None:
    done = script(
        "with requests.listening(): requests.defer(); requests.end_at_once('after x'); send(signal.SIGINT)"
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.rstrip().endswith("INFO r0 | SIGINT after x")


def test_a_second_signal_ends_the_process_unless_it_comes_with_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    requests = StopRequests()
    requests.defer()
    with caplog.at_level("INFO", logger="titanish"):
        requests._receive(signal.SIGTERM)
        requests._receive(signal.SIGTERM)
        assert (requests.signal, ended) == (signal.SIGTERM, [])
        monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 0)
        requests._receive(signal.SIGINT)
    assert ended == [128 + signal.SIGINT]
    assert "SIGINT again: this ends the process at once" in caplog.text


def test_a_rank_that_ends_by_itself_is_left_to(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    requests = StopRequests()
    requests.say_last_words()
    requests._receive(signal.SIGTERM)
    assert (requests.signal, ended) == (None, [])


def test_a_forked_child_keeps_working_and_is_not_taken_for_its_parent() -> None:
    done = script("""
with requests.listening():
    requests.defer()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
    print(os.waitpid(child, 0)[1], requests.signal)
""")
    assert done.stdout == f"{int(signal.SIGTERM)} None\n", done.stderr


def test_minutes_count_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 90)
    assert requests.minutes == pytest.approx(1.5, abs=0.01)
