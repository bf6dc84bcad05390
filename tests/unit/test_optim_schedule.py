"""The learning rate of every step: golden values, edges, and TorchTitan's documented formula."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from titanish.config.schema import LRScheduler
from titanish.optim.schedule import build_schedule


def factors(steps: int, **settings: object) -> list[float]:
    schedule = build_schedule(LRScheduler(**settings), steps)
    return [schedule.factor(step) for step in range(1, steps + 1)]


GOLDEN = {
    "warmup-then-stable": (
        {"warmup_steps": 4, "decay_ratio": 0.0},
        [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1],
    ),
    "warmup-stable-linear": (
        {"warmup_steps": 4, "decay_ratio": 0.4},
        [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25],
    ),
    "all-the-rest-decays": (
        {"warmup_steps": 4},
        [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ),
    "no-warmup": (
        {"warmup_steps": 0},
        [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
    ),
    "no-warmup-no-decay": ({"warmup_steps": 0, "decay_ratio": 0.0}, [1] * 10),
    "warmup-only": (
        {"warmup_steps": 10},
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1],
    ),
    "warmup-longer-than-the-run": (
        {"warmup_steps": 200},
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1],
    ),
    "decay-longer-than-what-is-left": (
        {"warmup_steps": 4, "decay_ratio": 1.0},
        [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ),
    "cosine-with-floor": (
        {"warmup_steps": 4, "decay_ratio": 0.4, "decay_type": "cosine", "min_lr_factor": 0.1},
        [0.25, 0.5, 0.75, 1, 1, 1, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * p)) for p in (0.25, 0.5, 0.75))],
    ),
    "sqrt-with-floor": (
        {"warmup_steps": 4, "decay_ratio": 0.4, "decay_type": "sqrt", "min_lr_factor": 0.1},
        [0.25, 0.5, 0.75, 1, 1, 1, 1, *(0.1 + 0.9 * (1 - math.sqrt(p)) for p in (0.25, 0.5, 0.75))],
    ),
    "floor-of-one-never-decays": (
        {"warmup_steps": 2, "min_lr_factor": 1.0},
        [0.5, *[1] * 9],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_step_uses_the_factor_written_down_here(name: str) -> None:
    settings, expected = GOLDEN[name]
    assert factors(10, **settings) == pytest.approx(expected, abs=1e-12)


def documented_factor(step: int, steps: int, s: SimpleNamespace) -> float:
    """TorchTitan v0.2.2, docs of `components/lr_scheduler.py`: the multiplier of the step that follows
    `step - 1` finished ones, with a stable stretch of one more step than is left over.
    """
    done = step - 1
    steps = s.total_steps or steps
    warmup = min(s.warmup_steps, steps)
    decay = steps - warmup if s.decay_ratio is None else min(round(steps * s.decay_ratio), steps - warmup)
    stable = steps + 1 - warmup - decay
    if done < warmup:
        return (done + 1) / warmup
    if done < warmup + stable:
        return 1.0
    progress = (done + 1 - (warmup + stable)) / decay
    curve = {
        "linear": 1 - progress,
        "sqrt": 1 - progress**0.5,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[s.decay_type]
    return s.min_lr_factor + (1 - s.min_lr_factor) * curve


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_every_step_of_many_settings_follows_the_documented_formula(decay_type: str) -> None:
    grid = itertools.product(
        [1, 2, 7, 30], [0, 1, 3, 7, 50], [None, 0.0, 0.1, 0.35, 0.5, 1.0], [0.0, 0.1], [None, 12]
    )
    for steps, warmup, ratio, floor, total in grid:
        settings = {
            "warmup_steps": warmup,
            "decay_ratio": ratio,
            "min_lr_factor": floor,
            "total_steps": total,
            "decay_type": decay_type,
        }
        # past the end of a schedule shorter than the run the factor stays where the decay ends
        last = min(steps, total or steps)
        expected = [
            documented_factor(step, steps, SimpleNamespace(**settings)) for step in range(1, last + 1)
        ]
        assert factors(steps, **settings)[:last] == pytest.approx(expected, abs=1e-12), settings


def test_no_step_of_a_run_has_a_learning_rate_of_zero() -> None:
    for warmup, ratio in itertools.product([0, 1, 5, 10], [None, 0.0, 0.5, 1.0]):
        assert min(factors(10, warmup_steps=warmup, decay_ratio=ratio)) > 0


def test_total_steps_shapes_the_schedule_instead_of_the_run() -> None:
    longer = factors(5, warmup_steps=2, total_steps=10)
    assert longer == factors(10, warmup_steps=2)[:5]
    shorter = factors(10, warmup_steps=2, total_steps=5, min_lr_factor=0.1)
    assert shorter[:5] == factors(5, warmup_steps=2, min_lr_factor=0.1)
    assert shorter[5:] == pytest.approx([0.1] * 5)  # stays at the floor


def test_a_step_depends_on_its_number_alone() -> None:
    # So a resumed run, which starts in the middle, uses what the unbroken one uses.
    schedule = build_schedule(LRScheduler(warmup_steps=4, decay_ratio=0.4), 10)
    whole = [schedule.factor(step) for step in range(1, 11)]
    for start in (3, 4, 5, 9):
        again = build_schedule(LRScheduler(warmup_steps=4, decay_ratio=0.4), 10)
        assert [again.factor(step) for step in range(start + 1, 11)] == whole[start:]
