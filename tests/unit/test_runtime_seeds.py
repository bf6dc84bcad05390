"""Generators: the same seed gives the same numbers, and a saved state goes on where it was."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from titanish.runtime.seeds import rng_state, set_determinism, set_rng_state, set_seed

Draw = tuple[float, float, float]


@dataclass(frozen=True)
class Debug:
    deterministic: bool = True
    deterministic_warn_only: bool = False


def draw() -> Draw:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def _torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = rng_state()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    set_rng_state(state)


def test_equal_seeds_give_equal_numbers_in_all_generators() -> None:
    set_seed(7, distinct=2)
    first = draw()
    set_seed(7, distinct=2)
    assert draw() == first


@pytest.mark.parametrize(("seed", "distinct"), [(7, 3), (8, 2), (2, 7)])
def test_another_seed_or_coordinate_gives_other_numbers_in_every_generator(seed: int, distinct: int) -> None:
    set_seed(7, distinct=2)
    first = draw()
    set_seed(seed, distinct=distinct)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_derived_seed_never_changes() -> None:
    # A changed value would give every resumed or repeated run other random numbers without a word.
    assert (set_seed(0, distinct=0), set_seed(7, distinct=2)) == (8161092689894003014, 7133567888265902388)


def test_a_restored_state_goes_on_with_the_numbers_it_was_saved_before() -> None:
    set_seed(1, distinct=0)
    random.gauss(0, 1)  # leaves a second number behind in the generator, which belongs to its state
    np.random.standard_normal()
    draw()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = random.gauss(0, 1), np.random.standard_normal(), draw()
    file.seek(0)
    set_seed(2, distinct=5)
    set_rng_state(torch.load(file, weights_only=True))
    assert (random.gauss(0, 1), np.random.standard_normal(), draw()) == expected


def test_a_state_saved_with_a_gpu_can_be_restored_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_seed(3, distinct=0)
    state = rng_state() | {"torch_cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    set_rng_state(state)
    assert draw() == expected


def test_determinism_is_left_alone_unless_asked_for() -> None:
    set_determinism(Debug(deterministic=False, deterministic_warn_only=True))
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("warn_only", [False, True])
def test_determinism_holds_for_torch_cudnn_and_cublas(warn_only: bool) -> None:
    set_determinism(Debug(deterministic_warn_only=warn_only))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_cublas_workspace_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_determinism(Debug())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
