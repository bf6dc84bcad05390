"""Windows: their maths, the order in which training takes them, and ids that the model does not have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titanish.data.indexed import IndexedReader, IndexedWriter
from titanish.data.permutation import permute
from titanish.data.windows import MockReader, TokenWindows
from titanish.errors import DataError


def reader(folder: Path, documents: list[list[int]]) -> IndexedReader:
    with IndexedWriter(folder / "data", np.dtype("int32")) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedReader(folder / "data")


def test_windows_overlap_by_one_token_and_drop_the_rest(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [[5, 6, 7], [], [70000, 8], list(range(9, 17))]), 4)
    assert windows.num_windows == 3  # (13 - 1) // 4
    assert [windows.window(i).tolist() for i in range(3)] == [
        [5, 6, 7, 70000, 8],
        [8, 9, 10, 11, 12],
        [12, 13, 14, 15, 16],
    ]
    assert windows.window(0).dtype == np.int64


@pytest.mark.parametrize(("num_tokens", "expected"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_number_of_windows(tmp_path: Path, num_tokens: int, expected: int) -> None:
    assert TokenWindows(reader(tmp_path, [list(range(num_tokens))]), 4).num_windows == expected


def test_a_kept_partial_window_holds_the_last_tokens(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [list(range(11))]), 4, keep_partial=True)
    assert windows.num_windows == 3
    assert windows.window(2).tolist() == [8, 9, 10]


def test_training_order_is_the_bijection_of_each_epoch(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [list(range(29))]), 4)
    assert windows.num_windows == 7
    for i in range(21):
        expected = windows.window(permute(i % 7, 7, (3, i // 7)))
        assert windows.sample(i, 3).tolist() == expected.tolist()


def test_each_epoch_takes_every_window_once_in_another_order(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [list(range(41))]), 4)
    epochs = [[int(windows.sample(i, 0)[0]) for i in range(10 * e, 10 * e + 10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_too_little_data_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.bin: 4 tokens are too few.* seq_len = 4 needs at least 5"):
        TokenWindows(reader(tmp_path, [[1, 2, 3, 4]]), 4)
    with pytest.raises(DataError, match=r"1 tokens are too few.* seq_len = 4 needs at least 2"):
        TokenWindows(reader(tmp_path, [[1]]), 4, keep_partial=True)


def test_an_id_outside_the_vocabulary_is_named_when_its_window_is_read(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [[1, 2, 3, 256, 4, 300, 5]]), 3, vocab_size=257)
    assert windows.window(0).tolist() == [1, 2, 3, 256]
    with pytest.raises(
        DataError,
        match=r"data\.bin: largest token id 300 \(tokens 3 to 6\) is outside the model's vocab_size = 257",
    ):
        windows.window(1)


def test_a_negative_id_is_named(tmp_path: Path) -> None:
    windows = TokenWindows(reader(tmp_path, [[1, -7]]), 1, vocab_size=257)
    with pytest.raises(DataError, match=r"token id -7 \(tokens 0 to 1\) is outside"):
        windows.window(0)


def test_mock_tokens_depend_on_position_and_seed_alone() -> None:
    mock = MockReader(257, seed=1)
    row = mock.tokens(0, 5000)
    assert mock.tokens(1234, 100).tolist() == row[1234:1334].tolist()
    assert MockReader(257, seed=1).tokens(0, 5000).tolist() == row.tolist()
    assert MockReader(257, seed=2).tokens(0, 5000).tolist() != row.tolist()
    assert set(row.tolist()) == set(range(257))


def test_mock_windows_have_no_end_in_effect() -> None:
    windows = TokenWindows(MockReader(257, seed=0), 128, vocab_size=257)
    assert windows.sample(10**9, 0).shape == (129,)
    assert windows.num_windows > 10**12
