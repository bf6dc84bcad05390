"""Python's garbage collection, at steps of our choosing.

Left alone, each rank collects when its own counters say so, and all others then wait for it in the next
collective. Collected at the same step everywhere, the pauses fall together.
"""

from __future__ import annotations

import gc
import logging
import time

logger = logging.getLogger("titanish")


class GarbageCollection:
    """Turns automatic collection off, and collects every `freq` steps instead; in every step and logged with
    `debug`.

    What exists when it is made (modules, the model) is set aside as permanent, so that a full collection
    looks only at what training has left since.
    """

    def __init__(self, freq: int, debug: bool = False) -> None:
        assert freq >= 1, f"training.gc_freq = {freq} passed the configuration"
        self.freq = 1 if debug else freq
        self.debug = debug
        gc.disable()
        gc.collect()
        # Objects that somebody set aside before are left to them, so that jobs in one process start quickly.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()

    def after_step(self, step: int) -> None:
        """Collects if it is time; `step` counts from 1."""
        if step % self.freq:
            return
        start = time.perf_counter()
        found = gc.collect()
        if self.debug:
            milliseconds = (time.perf_counter() - start) * 1e3
            logger.info(f"garbage collection after step {step}: {found} objects in {milliseconds:.1f} ms")

    def close(self) -> None:
        """Gives collection back to Python."""
        if self._froze:
            gc.unfreeze()
        gc.enable()
