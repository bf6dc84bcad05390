"""Rows carry the public names, and speed counts training only."""

from __future__ import annotations

import pytest

from titanish.observe.metrics import StepMetrics, Throughput


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def throughput(clock: Clock, peak_flops: float | None = None) -> Throughput:
    return Throughput(flops_per_token=1e6, world_size=4, peak_flops=peak_flops, clock=clock)


def metrics(**changes: object) -> StepMetrics:
    values: dict[str, object] = {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 1.25,
        "lr": 1e-4,
        "tokens_seen": 3072,
        "tokens_per_second": 512.0,
        "step_seconds": 2.0,
        "data_wait_fraction": 0.125,
        "memory_gib": 0.75,
        "model_flops_per_second": 1e9,
        "mfu": None,
    }
    return StepMetrics(**{**values, **changes})  # type: ignore[arg-type]  # the values are named above


def test_a_row_has_the_public_names_in_order_and_extras_last() -> None:
    assert list(metrics(extra={"validation_loss": 2.25}).row().items()) == [
        ("step", 3),
        ("loss", 2.5),
        ("grad_norm", 1.25),
        ("lr", 1e-4),
        ("tokens_seen", 3072),
        ("tokens_per_second", 512.0),
        ("step_seconds", 2.0),
        ("data_wait_fraction", 0.125),
        ("memory_gib", 0.75),
        ("model_flops_per_second", 1e9),
        ("mfu", None),
        ("validation_loss", 2.25),
    ]


def test_an_extra_may_not_take_a_standard_name() -> None:
    with pytest.raises(AssertionError, match=r"the name of a standard one: \['loss'\]"):
        metrics(extra={"loss": 1.0}).row()


def test_speed_is_the_mean_over_the_steps_of_all_ranks_tokens() -> None:
    clock = Clock()
    speeds = throughput(clock, peak_flops=1e9)
    for _ in range(4):
        clock.passes(0.5)
        speeds.step(1000)
    speed = speeds.read()
    assert speed.step_seconds == 0.5
    assert speed.tokens_per_second == 2000
    assert speed.model_flops_per_second == 2000 * 1e6 / 4  # of one rank among four
    assert speed.mfu == 0.5
    assert speed.data_wait_fraction == 0


def test_without_a_known_peak_there_is_no_mfu() -> None:
    clock = Clock()
    speeds = throughput(clock)
    clock.passes(1)
    speeds.step(1)
    assert speeds.read().mfu is None


def test_excluded_time_does_not_count_and_data_wait_is_a_share_of_the_rest() -> None:
    clock = Clock()
    speeds = throughput(clock)
    with speeds.data_wait():
        clock.passes(0.5)
    clock.passes(1.5)
    speeds.step(100)
    with speeds.excluded():
        clock.passes(60)
    speed = speeds.read()
    assert speed.step_seconds == 2.0
    assert speed.tokens_per_second == 50
    assert speed.data_wait_fraction == 0.25


def test_each_reading_counts_from_the_one_before() -> None:
    clock = Clock()
    speeds = throughput(clock)
    with speeds.data_wait():
        clock.passes(10)
    speeds.step(1)
    speeds.read()
    clock.passes(2)
    speeds.step(8)
    speed = speeds.read()
    assert (speed.step_seconds, speed.tokens_per_second, speed.data_wait_fraction) == (2, 4, 0)


def test_time_of_an_exclusion_that_fails_is_left_out_too() -> None:
    clock = Clock()
    speeds = throughput(clock)

    def fail() -> None:
        with speeds.excluded():
            clock.passes(5)
            raise ValueError("validation failed")

    with pytest.raises(ValueError, match="validation failed"):
        fail()
    clock.passes(1)
    speeds.step(1)
    assert speeds.read().step_seconds == 1


def test_a_clock_that_has_not_moved_gives_a_finite_speed() -> None:
    speeds = throughput(Clock())
    speeds.step(1)
    assert speeds.read().tokens_per_second == pytest.approx(1e9)


def test_speed_of_no_step_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="speed read before a step was counted"):
        throughput(Clock()).read()
