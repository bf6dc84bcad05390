"""Token files in Megatron's `.bin`/`.idx` format, written in a stream and read through memory maps.

`.bin` holds the ids of all sequences, nothing else. `.idx` (all little-endian) holds: 9 bytes magic, u64
version, u8 dtype code, u64 number of sequences n, u64 number of document boundaries d, then i32[n] sequence
lengths in tokens, i64[n] byte offsets into `.bin`, i64[d] the sequence number at which each document starts
and, last, n. A document without tokens may be a boundary without a sequence or a sequence of length 0; both
occur in the wild. The format is that of megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from titanish.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Sequences handled at a time where an array over all of them would not fit in memory.
_CHUNK = 1 << 20
PARTIAL_SUFFIX = ".partial"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype that Megatron writes ids of this vocabulary in: uint16 below 65500, else int32."""
    return _DTYPES[8] if vocab_size < 65500 else _DTYPES[4]


def bin_path(prefix: Path) -> Path:
    """Returns `<prefix>.bin` (a prefix may itself contain dots, so `with_suffix` would be wrong)."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Returns `<prefix>.idx`."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedWriter:
    """Writes one `.bin`/`.idx` pair in constant memory; the pair appears complete or not at all.

    Everything is written under temporary names, flushed to disk, and renamed when the `with` block ends
    without an exception: `.bin` first, so that an `.idx` always has its data. On an exception nothing is
    left behind.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        assert self.dtype in _CODES, f"no dtype code for {self.dtype}"
        self.num_tokens = 0
        self.num_documents = 0
        self._num_sequences = 0
        tag = f".{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}"
        self._paths = {part: prefix.with_name(f"{prefix.name}.{part}{tag}") for part in _PARTS}
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> IndexedWriter:
        self._files = {part: path.open("wb") for part, path in self._paths.items()}
        self._files["documents"].write(struct.pack("<q", 0))
        return self

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends one document of one sequence; one without tokens becomes a boundary only."""
        if len(tokens):
            self.add_sequence(tokens)
        self.end_document()

    def add_sequence(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends a sequence, also an empty one, to the open document.

        DataError for an id that the dtype does not hold.
        """
        ids = np.asarray(tokens, dtype=np.int64 if len(tokens) == 0 else None)
        limits = np.iinfo(self.dtype)
        if ids.size and not (limits.min <= ids.min() and ids.max() <= limits.max):
            worst = int(ids.max()) if ids.max() > limits.max else int(ids.min())
            raise DataError(
                f"{bin_path(self.prefix)}: token id {worst} does not fit in {self.dtype.name} "
                f"({limits.min} to {limits.max}); give the writer the dtype of the vocabulary"
            )
        if ids.size > np.iinfo(np.int32).max:
            raise DataError(
                f"{bin_path(self.prefix)}: a sequence of {ids.size} tokens; the format holds at most "
                f"{np.iinfo(np.int32).max} in one, split the document"
            )
        self._files["bin"].write(ids.astype(self.dtype).tobytes())
        self._files["lengths"].write(struct.pack("<i", ids.size))
        self.num_tokens += ids.size
        self._num_sequences += 1

    def end_document(self) -> None:
        """Closes the open document (one without any sequence is allowed)."""
        self._files["documents"].write(struct.pack("<q", self._num_sequences))
        self.num_documents += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for file in self._files.values():
                # On a full disk closing fails as well; what was committed has been flushed before.
                with contextlib.suppress(OSError):
                    file.close()
            for path in self._paths.values():
                path.unlink(missing_ok=True)

    def _commit(self) -> None:
        self._write_idx()
        for part in ("bin", "idx"):
            self._files[part].flush()
            os.fsync(self._files[part].fileno())
        # An older .idx must not describe the new .bin, not even for a moment.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._paths["bin"], bin_path(self.prefix))
        os.replace(self._paths["idx"], idx_path(self.prefix))
        fsync_folder(self.prefix.parent)

    def _write_idx(self) -> None:
        idx = self._files["idx"]
        code = _CODES[self.dtype]
        idx.write(_HEADER.pack(MAGIC, VERSION, code, self._num_sequences, self.num_documents + 1))
        for part in ("lengths", "documents"):
            self._files[part].flush()
        with self._paths["lengths"].open("rb") as lengths:
            shutil.copyfileobj(lengths, idx)
            lengths.seek(0)
            offset = 0
            while chunk := lengths.read(4 * _CHUNK):
                sizes = np.frombuffer(chunk, "<i4").astype("<i8") * self.dtype.itemsize
                ends = offset + np.cumsum(sizes)
                idx.write((ends - sizes).astype("<i8").tobytes())
                offset = int(ends[-1])
        with self._paths["documents"].open("rb") as documents:
            shutil.copyfileobj(documents, idx)


_PARTS = ("bin", "idx", "lengths", "documents")


class IndexedReader:
    """The tokens of a `.bin`/`.idx` pair as one long row, read on demand.

    `num_tokens` counts all sequences; `lengths` (tokens per sequence), `pointers` (byte offsets) and
    `documents` (boundaries, as in the file) are memory-mapped arrays. Opening checks the pair against
    itself and raises a DataError that names the file. A reader pickles as its prefix, so that sending one
    to a worker costs nothing.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self.path = bin_path(self.prefix)
        self._idx = idx_path(self.prefix)
        for path in (self._idx, self.path):
            if not path.is_file():
                raise DataError(f"{path}: no such file; token data is a pair of files, .bin and .idx")
        num_sequences, num_boundaries = self._read_header()
        index = np.memmap(self._idx, np.uint8, "r")
        end_lengths = _HEADER.size + 4 * num_sequences
        end_pointers = end_lengths + 8 * num_sequences
        self.lengths: np.ndarray = index[_HEADER.size : end_lengths].view("<i4")
        self.pointers: np.ndarray = index[end_lengths:end_pointers].view("<i8")
        self.documents: np.ndarray = index[end_pointers : end_pointers + 8 * num_boundaries].view("<i8")
        self._check_documents(num_sequences)
        bin_bytes = self.path.stat().st_size
        self.num_tokens, contiguous = self._check_sequences(bin_bytes)
        self._ids: np.ndarray = np.memmap(self.path, np.uint8, "r") if bin_bytes else np.empty(0, np.uint8)
        # Only files whose sequences do not follow one another need a table of where each begins.
        self._starts = None if contiguous else np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __reduce__(self) -> tuple[type[IndexedReader], tuple[Path]]:
        return IndexedReader, (self.prefix,)

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Returns `count` ids from position `start` of all sequences laid end to end, in the file's dtype."""
        assert 0 <= start <= start + count <= self.num_tokens, (start, count, self.num_tokens)
        if count == 0:
            return np.empty(0, self.dtype)
        if self._starts is None:
            return self._span(int(self.pointers[0]) + start * self.dtype.itemsize, count)
        pieces = []
        sequence = int(np.searchsorted(self._starts, start, side="right")) - 1
        end = start + count
        while start < end:
            offset = start - int(self._starts[sequence])
            taken = min(end - start, int(self.lengths[sequence]) - offset)
            if taken > 0:
                pieces.append(self._span(int(self.pointers[sequence]) + offset * self.dtype.itemsize, taken))
            start += taken
            sequence += 1
        return np.concatenate(pieces)

    def _span(self, byte: int, count: int) -> np.ndarray:
        return np.frombuffer(self._ids, self.dtype, count, byte)

    def _read_header(self) -> tuple[int, int]:
        """Sets `dtype`; returns the numbers of sequences and of document boundaries."""
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            header = file.read(_HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{self._idx}: starts with {header[: len(MAGIC)]!r}, not with {MAGIC!r}: "
                "this is not a Megatron .idx file"
            )
        if len(header) < _HEADER.size:
            raise DataError(f"{self._idx}: {size} bytes, shorter than the header's {_HEADER.size}: cut off")
        _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{self._idx}: format version {version}; only version {VERSION} can be read")
        if code in _FLOAT_CODES:
            raise DataError(
                f"{self._idx}: dtype code {code} ({_FLOAT_CODES[code]}): token ids must be integers"
            )
        if code not in _DTYPES:
            raise DataError(f"{self._idx}: unknown dtype code {code}; known are {sorted(_DTYPES)}")
        self.dtype = _DTYPES[code]
        expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if size != expected:
            why = (
                "multimodal data is not supported"
                if size == expected + num_sequences
                else "cut off or damaged"
            )
            raise DataError(
                f"{self._idx}: {size} bytes, but {num_sequences} sequences and {num_boundaries} document "
                f"boundaries take {expected}: {why}"
            )
        return num_sequences, num_boundaries

    def _check_documents(self, num_sequences: int) -> None:
        last = int(self.documents[-1]) if len(self.documents) else None
        if last != num_sequences:
            raise DataError(
                f"{self._idx}: the last document boundary is {last}, but there are {num_sequences} "
                "sequences: the file is damaged"
            )

    def _check_sequences(self, bin_bytes: int) -> tuple[int, bool]:
        """Returns the number of tokens and whether the sequences follow one another without gaps."""
        num_tokens, contiguous, next_byte = 0, True, None
        for first in range(0, len(self.lengths), _CHUNK):
            lengths = self.lengths[first : first + _CHUNK].astype(np.int64)
            begins = self.pointers[first : first + _CHUNK]
            ends = begins + lengths * self.dtype.itemsize
            if lengths.min() < 0 or begins.min() < 0:
                raise DataError(
                    f"{self._idx}: holds a negative sequence length or offset: the file is damaged"
                )
            if ends.max() > bin_bytes:
                raise DataError(
                    f"{self.path}: {bin_bytes} bytes, but {self._idx.name} refers to {int(ends.max())}: "
                    "the file is cut off, or the two do not belong together"
                )
            follows_last = next_byte is None or begins[0] == next_byte
            contiguous = contiguous and bool(follows_last and (begins[1:] == ends[:-1]).all())
            next_byte = ends[-1]
            num_tokens += int(lengths.sum())
        return num_tokens, contiguous


def fsync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
