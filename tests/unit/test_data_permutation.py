"""The keyed order of the windows: a bijection for every size, another for each seed and epoch, and fixed."""

from __future__ import annotations

import numpy as np
import pytest

from titanish.data.permutation import permute


def test_is_a_bijection_for_every_small_size() -> None:
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, (7, 3)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**32 - 5, 10**12 + 39, 2**48, 2**62 + 1])
def test_large_sizes_stay_in_range_without_collisions(n: int) -> None:
    rng = np.random.default_rng(0)
    index = np.unique(rng.integers(0, n, 20_000))
    result = permute(index, n, (1, 0))
    assert result.min() >= 0
    assert result.max() < n
    assert len(np.unique(result)) == len(index)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 256, 257, 1000, 10**12])
def test_one_index_and_an_array_agree(n: int) -> None:
    index = np.arange(min(n, 300))
    assert [permute(int(i), n, (5, 2)) for i in index] == permute(index, n, (5, 2)).tolist()


def test_an_array_keeps_its_shape() -> None:
    index = np.arange(12).reshape(3, 4)
    result = permute(index, 12, (0, 0))
    assert result.shape == (3, 4)
    assert result.dtype == np.int64


def test_the_order_never_changes() -> None:
    # A resumed run continues in this order: if one of these numbers changes, it reads other data than it
    # should.
    assert permute(np.arange(16), 16, (0, 0)).tolist() == [
        4,
        2,
        3,
        11,
        10,
        1,
        9,
        8,
        12,
        6,
        15,
        14,
        7,
        13,
        0,
        5,
    ]
    assert permute(np.arange(10), 10, (1234, 5)).tolist() == [2, 8, 3, 7, 6, 5, 4, 9, 1, 0]
    assert permute(np.arange(3), 10**12, (42, 0)).tolist() == [652325596240, 452679327297, 559434046228]
    assert permute(np.arange(3), 1_000_003, (-3, 1)).tolist() == [566548, 614657, 289453]


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {
        key: tuple(permute(np.arange(50), 50, key))
        for key in [(0, 0), (1, 0), (0, 1), (1, 1), (10, 1), (1, 10)]
    }
    assert len(set(orders.values())) == len(orders)


def test_every_order_of_three_is_about_equally_frequent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(3000):
        order = tuple(permute(i, 3, (0, epoch)) for i in range(3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # Expected 500 each with a standard deviation of 20; five of them leave no room for chance.
    assert all(400 < count < 600 for count in counts.values())


def test_positions_are_spread_evenly() -> None:
    n, parts = 100_000, 20
    table = np.zeros((parts, parts))
    order = permute(np.arange(n), n, (3, 0))
    np.add.at(table, (np.arange(n) * parts // n, order * parts // n), 1)
    chi_square = ((table - n / parts**2) ** 2 / (n / parts**2)).sum()
    # 361 degrees of freedom: mean 361, standard deviation 27.
    assert 361 - 5 * 27 < chi_square < 361 + 5 * 27


def test_an_index_outside_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"index 5 outside \[0, 5\)"):
        permute(5, 5, (0, 0))
    with pytest.raises(AssertionError, match=r"index outside \[0, 5\)"):
        permute(np.array([0, 5]), 5, (0, 0))
