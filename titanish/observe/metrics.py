"""What a step is worth telling: its numbers under their public names, and the speed that they were reached
at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

Row = dict[str, float | int | None]
"""One logged step: `step` and any number of named values; None where a value is not known."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one training step, as they stand in `metrics.jsonl`; `extra` holds what features add.

    `loss` and `grad_norm` (before clipping) are of the whole global batch; `lr` is what the step was taken
    with; `tokens_seen` counts from the start of training, over all ranks; `tokens_per_second` is over all
    ranks, `model_flops_per_second` and `memory_gib` of one. Speeds are means over the steps since the last
    logged one.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    tokens_per_second: float
    step_seconds: float
    data_wait_fraction: float
    memory_gib: float
    model_flops_per_second: float
    mfu: float | None
    extra: dict[str, float] = field(default_factory=dict)

    def row(self) -> Row:
        """All values by name, those of `extra` last."""
        named: Row = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extra"}
        twice = named.keys() & self.extra.keys()
        assert not twice, f"an extra metric has the name of a standard one: {sorted(twice)}"
        return {**named, **self.extra}


@dataclass(frozen=True)
class Speed:
    """Means over the steps of one reading of `Throughput`; the names are those of `StepMetrics`."""

    tokens_per_second: float
    step_seconds: float
    data_wait_fraction: float
    model_flops_per_second: float
    mfu: float | None


class Throughput:
    """Measures the speed of training between two readings, without the time that is spent on anything else.

    `flops_per_token` is the model's, forward and backward, at the sequence length of the run; `peak_flops` is
    the device's, None where unknown (there is then no MFU). The clock starts with the object.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        world_size: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._peak_flops = peak_flops
        self._clock = clock
        self._restart()

    def step(self, tokens: int) -> None:
        """Counts one finished step over `tokens` tokens, those of all ranks."""
        self._steps += 1
        self._tokens += tokens

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        start = self._clock()
        try:
            yield
        finally:
            self._data_seconds += self._clock() - start

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leaves the time inside out: validation, checkpoints. Not to be nested, nor to stand in
        `data_wait`."""
        start = self._clock()
        try:
            yield
        finally:
            self._excluded_seconds += self._clock() - start

    def read(self) -> Speed:
        """The speed since the last reading; the next one counts from here. Needs at least one `step`
        between."""
        assert self._steps > 0, "speed read before a step was counted"
        # A coarse clock may not have moved at all; infinite speed would be of no use to anyone.
        seconds = max(self._clock() - self._start - self._excluded_seconds, 1e-9)
        tokens_per_second = self._tokens / seconds
        flops = tokens_per_second * self._flops_per_token / self._world_size
        speed = Speed(
            tokens_per_second=tokens_per_second,
            step_seconds=seconds / self._steps,
            data_wait_fraction=self._data_seconds / seconds,
            model_flops_per_second=flops,
            mfu=flops / self._peak_flops if self._peak_flops else None,
        )
        self._restart()
        return speed

    def _restart(self) -> None:
        self._steps = 0
        self._tokens = 0
        self._data_seconds = 0.0
        self._excluded_seconds = 0.0
        self._start = self._clock()
