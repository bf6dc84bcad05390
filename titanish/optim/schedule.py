"""The learning rate as a pure function of the step: nothing to save, nothing to get out of step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanish.config.schema import LRScheduler


@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warm-up, a stretch at the peak, then a decay towards `floor`; TorchTitan's (v0.2.2) at every
    step.

    Step s (the first is 1) uses s/warmup while s <= warmup, then 1 up to step total + 1 - decay, then
    floor + (1 - floor) f(p) with p = (s - (total + 1 - decay)) / decay and f linear 1 - p, sqrt 1 - sqrt(p)
    or cosine (1 + cos(pi p)) / 2. The decay would reach the floor one step after the last, so the last step
    still learns.
    """

    total: int
    warmup: int
    decay: int
    shape: str
    floor: float

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied with in step `step`, counted from 1."""
        if step <= self.warmup:
            return step / self.warmup
        stable_until = self.total + 1 - self.decay
        if step <= stable_until or self.decay == 0:
            return 1.0
        p = min((step - stable_until) / self.decay, 1.0)
        f = {"linear": 1 - p, "sqrt": 1 - math.sqrt(p), "cosine": 0.5 * (1 + math.cos(math.pi * p))}[
            self.shape
        ]
        return self.floor + (1 - self.floor) * f


def build_schedule(section: LRScheduler, steps: int) -> WarmupStableDecay:
    """The schedule of a run of `steps` steps, or of `total_steps` where that is set.

    A warm-up longer than the run is cut to it, a decay to what the warm-up leaves; `decay_ratio` unset means
    that the decay begins where the warm-up ends.
    """
    total = section.total_steps or steps
    warmup = min(section.warmup_steps, total)
    rest = total - warmup
    decay = rest if section.decay_ratio is None else min(round(total * section.decay_ratio), rest)
    return WarmupStableDecay(
        total=total, warmup=warmup, decay=decay, shape=section.decay_type, floor=section.min_lr_factor
    )
