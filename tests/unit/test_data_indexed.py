"""Token files: the bytes are Megatron's, writing is all or nothing, and a damaged file is named."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from titanish.data.indexed import IndexedReader, IndexedWriter, bin_path, idx_path, token_dtype
from titanish.errors import DataError

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures/data/indexed_golden.json").read_text())
CASE = [[5, 6, 7], [], [70000, 8], [9, 10, 11, 12, 13, 14, 15, 16]]


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def write_case(prefix: Path) -> Path:
    """Documents of one sequence each, the empty one too, as Megatron's `add_item` and `end_document` do."""
    with IndexedWriter(prefix, np.dtype("int32")) as writer:
        for document in CASE:
            writer.add_sequence(document)
            writer.end_document()
    return prefix


def test_files_are_byte_for_byte_those_of_megatron(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", GOLDEN["documents"], GOLDEN["dtype"])
    assert bin_path(prefix).read_bytes().hex() == GOLDEN["bin_hex"]
    assert idx_path(prefix).read_bytes().hex() == GOLDEN["idx_hex"]


def test_empty_sequences_keep_their_place_in_the_index(tmp_path: Path) -> None:
    prefix = write_case(tmp_path / "data")
    index = idx_path(prefix).read_bytes()
    assert bin_path(prefix).stat().st_size == 52
    assert len(index) == 122
    assert struct.unpack_from("<9sQBQQ", index) == (b"MMIDIDX\0\0", 1, 4, 4, 5)
    assert struct.unpack_from("<4i", index, 34) == (3, 0, 2, 8)
    assert struct.unpack_from("<4q", index, 50) == (0, 12, 12, 20)
    assert struct.unpack_from("<5q", index, 82) == (0, 1, 2, 3, 4)


def test_an_index_longer_than_one_chunk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanish.data.indexed._CHUNK", 3)
    documents = [[i, i + 1] if i % 3 else [i] for i in range(11)]
    reader = IndexedReader(write(tmp_path / "data", documents))
    lengths = [len(document) for document in documents]
    assert reader.lengths.tolist() == lengths
    assert reader.pointers.tolist() == [2 * sum(lengths[:i]) for i in range(11)]
    assert reader.num_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")]
)
def test_dtype_follows_megatrons_rule(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_every_integer_dtype_reads_back(tmp_path: Path, dtype: str) -> None:
    reader = IndexedReader(write(tmp_path / "data", [[1, 2], [3, 127]], dtype))
    assert reader.dtype == np.dtype(dtype)
    assert reader.tokens(0, 4).tolist() == [1, 2, 3, 127]


def test_spans_cross_sequences(tmp_path: Path) -> None:
    reader = IndexedReader(write_case(tmp_path / "data"))
    everything = [token for document in CASE for token in document]
    assert reader.num_tokens == 13
    assert reader.documents.tolist() == [0, 1, 2, 3, 4]
    for start in range(14):
        for count in range(14 - start):
            assert reader.tokens(start, count).tolist() == everything[start : start + count]


def test_sequences_may_lie_anywhere_in_the_bin(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    index = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<3i", index, 34, 4, 3, 2)
    struct.pack_into("<3q", index, 46, 10, 0, 6)
    idx_path(prefix).write_bytes(index)
    reader = IndexedReader(prefix)
    everything = [6, 7, 8, 9, 1, 2, 3, 4, 5]
    for start in range(10):
        for count in range(10 - start):
            assert reader.tokens(start, count).tolist() == everything[start : start + count]


def test_a_pair_without_tokens_is_readable(tmp_path: Path) -> None:
    reader = IndexedReader(write(tmp_path / "data", [[], []]))
    assert reader.num_tokens == 0
    assert reader.documents.tolist() == [0, 0, 0]
    assert reader.tokens(0, 0).tolist() == []


def test_a_reader_travels_to_a_worker_as_its_path(tmp_path: Path) -> None:
    reader = IndexedReader(write(tmp_path / "data", [list(range(5000))]))
    sent = pickle.dumps(reader)
    assert len(sent) < 500
    assert pickle.loads(sent).tokens(4998, 2).tolist() == [4998, 4999]


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError), IndexedWriter(tmp_path / "data", np.dtype("uint16")) as writer:
        writer.add_document([-1])
    assert list(tmp_path.iterdir()) == []


def test_the_pair_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.dtype("uint16")) as writer:
        writer.add_document([1])
        assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize(("token", "dtype"), [(65536, "uint16"), (-1, "uint16"), (2**31, "int32")])
def test_an_id_that_does_not_fit_is_refused(tmp_path: Path, token: int, dtype: str) -> None:
    with (
        pytest.raises(
            DataError, match=rf"data\.bin: token id {token} does not fit in {dtype} .*give the writer"
        ),
        IndexedWriter(tmp_path / "data", np.dtype(dtype)) as writer,
    ):
        writer.add_document([5, token])


def test_a_sequence_that_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    endless = np.broadcast_to(np.uint8(1), (2**31,))  # one byte in memory
    with (
        pytest.raises(
            DataError, match=r"a sequence of 2147483648 tokens; the format holds at most 2147483647"
        ),
        IndexedWriter(tmp_path / "data", np.dtype("uint8")) as writer,
    ):
        writer.add_sequence(endless)


def patched(prefix: Path, offset: int, layout: str, *values: int) -> None:
    index = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into(layout, index, offset, *values)
    idx_path(prefix).write_bytes(index)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<B", 65, r"data\.idx: starts with b'AMIDIDX.*not a Megatron \.idx file"),
        (9, "<Q", 2, r"data\.idx: format version 2; only version 1 can be read"),
        (17, "<B", 9, r"data\.idx: unknown dtype code 9; known are \[1, 2, 3, 4, 5, 8\]"),
        (17, "<B", 7, r"data\.idx: dtype code 7 \(float32\): token ids must be integers"),
        (18, "<Q", 40, r"data\.idx: 82 bytes, but 40 sequences and 3 document boundaries take 538: cut off"),
        (34, "<i", -2, r"data\.idx: holds a negative sequence length or offset"),
        (34, "<i", 9, r"data\.bin: 10 bytes, but data\.idx refers to 18: the file is cut off"),
        (74, "<q", 1, r"data\.idx: the last document boundary is 1, but there are 2 sequences"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, offset: int, layout: str, value: int, message: str) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4, 5]])
    patched(prefix, offset, layout, value)
    with pytest.raises(DataError, match=message):
        IndexedReader(prefix)


def test_a_cut_off_header_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1]])
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:20])
    with pytest.raises(DataError, match=r"data\.idx: 20 bytes, shorter than the header's 34"):
        IndexedReader(prefix)


def test_multimodal_files_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1], [2]])
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes() + b"\0\1")
    with pytest.raises(DataError, match=r"data\.idx: .*multimodal data is not supported"):
        IndexedReader(prefix)


def test_a_truncated_bin_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4, 5]])
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-1])
    with pytest.raises(
        DataError, match=r"data\.bin: 9 bytes, but data\.idx refers to 10: the file is cut off"
    ):
        IndexedReader(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_half_is_named(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "data", [[1]])
    (tmp_path / f"data{ending}").unlink()
    with pytest.raises(DataError, match=rf"data\{ending}: no such file; token data is a pair"):
        IndexedReader(tmp_path / "data")
