"""Changing a key changes what it says: a row for each, seen on whole training jobs.

The rows stand in `tests/effects`. Each key is changed alone, in a job of its own; rows that change the same
job share what is seen without the change.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.effects.ran import Effect, Ran, train
from tests.effects.table import EFFECTS, see
from titanish.testing.ranks import RankPool

Pool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def unchanged(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Effect], dict[str, Any]]:
    """What all rows of a setting see of its job."""

    @cache
    def seen(setting: tuple[Any, ...]) -> dict[str, Any]:
        keys = [key for key, effect in EFFECTS.items() if effect.setting() == setting]
        folder = tmp_path_factory.mktemp("unchanged")
        return pool(EFFECTS[keys[0]].ranks).run(see, keys, str(folder), changed=False)[0]

    return lambda effect: seen(effect.setting())


@pytest.mark.parametrize("key", EFFECTS)
def test_changing_a_key_has_its_effect(
    pool: Pool, unchanged: Callable[[Effect], dict[str, Any]], tmp_path: Path, key: str
) -> None:
    effect = EFFECTS[key]
    before = unchanged(effect)[key]
    after = pool(effect.ranks).run(see, [key], str(tmp_path), changed=True)[0][key]
    assert before == effect.before
    assert after == effect.after
    assert before != after


def test_gradients_are_summed_in_float32_whatever_computes_them(pool: Pool, tmp_path: Path) -> None:
    assert pool(2).run(summed_types, str(tmp_path))[0] == ({"torch.bfloat16"}, {"torch.float32"})


def summed_types(folder: str) -> tuple[set[str], set[str]]:
    """The types that forward passes computed in, and those that gradients were summed in."""
    ran: Ran = train(
        folder, ["--training.mixed_precision_param=bfloat16", "--training.mixed_precision_reduce=float32"]
    )
    return {str(each.dtype) for each in ran.trained}, {str(dtype) for dtype in ran.reduced}


def test_the_seed_decides_weights_data_and_draws_each(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool(1).run(seeded, str(tmp_path), 7)
    (again,) = pool(1).run(seeded, str(tmp_path), 7)
    (other,) = pool(1).run(seeded, str(tmp_path), 8)
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))


def seeded(folder: str, seed: int) -> tuple[float, list[int], float]:
    """An initial weight, the first sequence, and the first number that a layer drew."""
    ran = train(folder, [f"--debug.seed={seed}"])
    return ran.initial["output.weight"][0, 0].item(), ran.trained[0].tokens[0].tolist(), ran.draws[0]


@pytest.mark.parametrize("persistent", [True, False])
def test_no_loader_process_outlives_its_job(pool: Pool, tmp_path: Path, persistent: bool) -> None:
    assert pool(1).run(processes_left, str(tmp_path), persistent) == [(2, 0)]


def processes_left(folder: str, persistent: bool) -> tuple[int, int]:
    """How many processes loaded data at the end of training, and how many are left after the job."""
    flags = ["--validation.enable", "--validation.dataset=mock", "--validation.steps=1"]
    for section in ("training", "validation"):
        flags += [f"--{section}.dataloader.num_workers=1"]
        flags += [f"--{section}.dataloader.persistent_workers={str(persistent).lower()}"]
    ran = train(folder, flags)
    return len(ran.judged[-1].loaders), len(multiprocessing.active_children())
