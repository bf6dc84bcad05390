"""Windows of `seq_len + 1` tokens over a row of tokens, and which of them a training sample is.

Window i covers tokens [i * seq_len, i * seq_len + seq_len], so neighbours share one token: the last label
of one is the first input of the next, and every token after the first is a label exactly once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from titanish.data.permutation import mix64, permute
from titanish.errors import DataError


class TokenReader(Protocol):
    """A row of `num_tokens` token ids; `path` names it in messages."""

    num_tokens: int
    path: Path

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Returns the ids at positions [start, start + count)."""
        ...


class MockReader:
    """Tokens that depend on position and seed alone, without a file; pseudo-random and endless in effect."""

    def __init__(self, vocab_size: int, seed: int, num_tokens: int = 1 << 48) -> None:
        self.vocab_size, self.seed, self.num_tokens = vocab_size, seed, num_tokens
        self.path = Path("mock")
        self._key = np.uint64(mix64(seed % (1 << 64)))

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Returns int64 ids in [0, vocab_size)."""
        positions = np.arange(start, start + count, dtype=np.uint64)
        return (mix64(positions ^ self._key) % self.vocab_size).astype(np.int64)


class TokenWindows:
    """The windows of a reader, in file order (`window`) and in training order (`sample`).

    `vocab_size`, where given, is the model's: an id outside of it is a DataError when its window is read.
    With `keep_partial` the tokens after the last whole window form one more, shorter window (for
    validation).
    """

    def __init__(
        self, reader: TokenReader, seq_len: int, *, vocab_size: int | None = None, keep_partial: bool = False
    ) -> None:
        self.reader, self.seq_len, self.vocab_size = reader, seq_len, vocab_size
        self.keep_partial = keep_partial
        num_labels = max(0, reader.num_tokens - 1)
        self.num_windows = -(-num_labels // seq_len) if keep_partial else num_labels // seq_len
        if self.num_windows == 0:
            needed = 2 if keep_partial else seq_len + 1
            raise DataError(
                f"{reader.path}: {reader.num_tokens} tokens are too few for one window: seq_len = {seq_len} "
                f"needs at least {needed}; use more data or a smaller seq_len"
            )

    def window(self, index: int) -> np.ndarray:
        """Returns window `index` as int64 ids of shape (seq_len + 1,), or fewer for a partial last one."""
        start = index * self.seq_len
        count = min(self.seq_len + 1, self.reader.num_tokens - start)
        ids = self.reader.tokens(start, count).astype(np.int64)
        if self.vocab_size is not None and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            largest, smallest = int(ids.max()), int(ids.min())
            worst = f"largest token id {largest}" if largest >= self.vocab_size else f"token id {smallest}"
            raise DataError(
                f"{self.reader.path}: {worst} (tokens {start} to {start + count - 1}) is outside the model's "
                f"vocab_size = {self.vocab_size}; the data was made with another tokenizer, or the model "
                "needs a larger vocabulary"
            )
        return ids

    def sample(self, global_index: int, seed: int) -> np.ndarray:
        """Returns the window of training sample `global_index` = 0, 1, ... without end; int64 (seq_len + 1,).

        Each pass over the data visits every window once, in an order given by (seed, epoch) alone.
        """
        epoch, position = divmod(global_index, self.num_windows)
        return self.window(permute(position, self.num_windows, (seed, epoch)))
