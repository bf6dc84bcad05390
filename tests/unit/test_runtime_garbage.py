"""Garbage collection happens at the steps that it is asked for, and at no others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest

from titanish.runtime.garbage import GarbageCollection


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_are_collected_every_freq_steps_only() -> None:
    collection = GarbageCollection(freq=3)
    assert not gc.isenabled()
    alive = weakref.ref(Cycle())
    seen = []
    for step in (1, 2, 3):
        collection.after_step(step)
        seen.append(alive() is not None)
    assert seen == [True, True, False]


def test_what_is_there_at_the_start_is_set_aside() -> None:
    GarbageCollection(freq=1)
    assert gc.get_freeze_count() > 0


def test_debug_collects_after_each_step_and_logs_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    collection = GarbageCollection(freq=50, debug=True)
    Cycle()
    with caplog.at_level(logging.INFO, logger="titanish"):
        collection.after_step(1)
        collection.after_step(2)
    first, second = caplog.messages
    assert first.startswith("garbage collection after step 1: ")
    assert first.endswith(" ms")
    assert int(first.split(": ")[1].split()[0]) >= 1
    assert second.startswith("garbage collection after step 2: 0 objects in ")


def test_what_others_set_aside_is_left_to_them() -> None:
    gc.freeze()
    GarbageCollection(freq=1).close()
    assert gc.get_freeze_count() > 0


def test_close_gives_collection_back_to_python() -> None:
    GarbageCollection(freq=1).close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
