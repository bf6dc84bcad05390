"""Loaders: the same samples for every layout, worker count and restart; validation counts each token once."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titanish.data.indexed import IndexedReader, IndexedWriter
from titanish.data.loader import StepBatch, TrainLoader, ValidationBatches
from titanish.data.prepare import prepare
from titanish.data.sources import text_files
from titanish.data.tokenizer import ByteTokenizer
from titanish.data.windows import MockReader, TokenWindows
from titanish.errors import DataError

SEQ = 8


class OneIdPerDocument(ByteTokenizer):
    """Encodes the text "<id> <length>" as that id, repeated; and counts its calls."""

    vocab_size = 1 << 20

    def __init__(self) -> None:
        self.calls = 0

    def encode_documents(self, texts: Sequence[str], *, add_bos: bool, add_eos: bool) -> list[np.ndarray]:
        self.calls += 1
        return [np.full(int(text.split()[1]), int(text.split()[0]), np.int32) for text in texts]


def jsonl_prefix(folder: Path, num_documents: int, tokenizer: ByteTokenizer, num_files: int = 1) -> Path:
    """Document i is the id 3 + i, `SEQ` times: each window of `SEQ` inputs holds one document exactly."""
    for part in range(num_files):
        lines = [f"{3 + i} {SEQ}" for i in range(num_documents) if i * num_files // num_documents == part]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"part-{part}.jsonl").write_text(text)
    source = text_files(f"{folder}/part-*.jsonl", setting="training.dataset_path", text_field="text")
    return prepare(source, tokenizer, add_bos=False, add_eos=False, cache_dir=folder / "cache")


@pytest.fixture
def windows(tmp_path: Path) -> TokenWindows:
    """Windows of 97 documents, one each but for the last, whose label would be missing."""
    return TokenWindows(IndexedReader(jsonl_prefix(tmp_path, 97, OneIdPerDocument())), SEQ)


@contextmanager
def loading(windows: TokenWindows, **settings: Any) -> Iterator[TrainLoader]:
    settings = {"seed": 0, "seq_len": SEQ, "global_batch_size": 6, **settings}
    loader = TrainLoader(windows, **settings)
    try:
        yield loader
    finally:
        loader.close()


def steps(windows: TokenWindows, count: int, **settings: Any) -> list[StepBatch]:
    with loading(windows, **settings) as loader:
        return list(islice(loader, count))


def documents(batch: StepBatch) -> list[int]:
    """The document of each sample of a batch."""
    assert (batch["tokens"] == batch["tokens"][:, :1]).all()
    return [int(first) - 3 for first in batch["tokens"][:, 0]]


def same(left: Sequence[StepBatch], right: Sequence[StepBatch]) -> bool:
    assert len(left) == len(right)
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(a["tokens"], b["tokens"]) and torch.equal(a["labels"], b["labels"]) for a, b in pairs
    )


def test_a_batch_is_one_ranks_whole_step_with_shifted_labels() -> None:
    windows = TokenWindows(MockReader(257, seed=0), SEQ)
    (batch,) = steps(windows, 1, batch_rank=1, batch_ranks=3)
    expected = np.stack([windows.sample(i, 0) for i in (2, 3)])
    assert batch["tokens"].tolist() == expected[:, :-1].tolist()
    assert batch["labels"].tolist() == expected[:, 1:].tolist()
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["tokens"].is_contiguous()
    assert batch["labels"].is_contiguous()


@pytest.mark.parametrize("batch_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_reads_the_steps_that_an_unbroken_run_reads(
    windows: TokenWindows, num_workers: int, batch_ranks: int
) -> None:
    for batch_rank in range(batch_ranks):
        layout = {"batch_rank": batch_rank, "batch_ranks": batch_ranks}
        whole = steps(windows, 12, **layout)
        with loading(windows, num_workers=num_workers, **layout) as loader:
            before = list(islice(loader, 5))
            consumed = loader.consumed_samples
        after = steps(windows, 7, start_sample=consumed, num_workers=num_workers, **layout)
        assert consumed == 30  # not what workers have read ahead
        assert same(before + after, whole)


@pytest.mark.parametrize("start_sample", [0, 7, 30, 100])
def test_workers_change_nothing(windows: TokenWindows, start_sample: int) -> None:
    alone = steps(windows, 6, start_sample=start_sample)
    assert same(steps(windows, 6, start_sample=start_sample, num_workers=2), alone)


def test_worker_settings_change_nothing(windows: TokenWindows) -> None:
    settings = {"persistent_workers": True, "prefetch_factor": 5, "pin_memory": True}
    alone = steps(windows, 6)
    assert same(steps(windows, 6, num_workers=1, **settings), alone)
    assert same(steps(windows, 6, **settings), alone)


def test_worker_settings_reach_the_loader(windows: TokenWindows) -> None:
    with loading(windows, num_workers=2, prefetch_factor=5, persistent_workers=True) as loader:
        inner = loader._batches._loader
        assert (inner.num_workers, inner.prefetch_factor, inner.persistent_workers) == (2, 5, True)
        assert inner.multiprocessing_context.get_start_method() == "forkserver"


@pytest.mark.parametrize("batch_ranks", [1, 2, 3, 6])
def test_ranks_share_each_step_without_changing_its_order(windows: TokenWindows, batch_ranks: int) -> None:
    expected = [documents(batch) for batch in steps(windows, 8)]
    parts = [steps(windows, 8, batch_rank=rank, batch_ranks=batch_ranks) for rank in range(batch_ranks)]
    for step in range(8):
        assert [d for part in parts for d in documents(part[step])] == expected[step]


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_over_two_ranks_reads_every_window_once(
    tmp_path: Path, num_workers: int, num_files: int
) -> None:
    prefix = jsonl_prefix(tmp_path, 97, OneIdPerDocument(), num_files)
    windows = TokenWindows(IndexedReader(prefix), SEQ)
    assert windows.num_windows == 96
    read = []
    for rank in range(2):
        batches = steps(windows, 16, batch_rank=rank, batch_ranks=2, num_workers=num_workers)
        read.append({document for batch in batches for document in documents(batch)})
    assert not read[0] & read[1]
    assert read[0] | read[1] == set(range(96))


def test_the_seed_changes_the_order_and_ranks_stay_disjoint(windows: TokenWindows) -> None:
    orders = []
    for seed in (0, 1):
        parts = [steps(windows, 16, seed=seed, batch_rank=rank, batch_ranks=2) for rank in range(2)]
        flat = [[d for batch in part for d in documents(batch)] for part in parts]
        assert not set(flat[0]) & set(flat[1])
        orders.append(flat)
    assert orders[0] != orders[1]


def test_a_step_may_cross_into_the_next_epoch(windows: TokenWindows) -> None:
    (batch,) = steps(windows, 1, start_sample=93)
    assert documents(batch) == [int(windows.sample(i, 0)[0]) - 3 for i in range(93, 99)]


def test_iterating_again_begins_at_the_start(windows: TokenWindows) -> None:
    with loading(windows, start_sample=12) as loader:
        first = list(islice(loader, 2))
        second = list(islice(loader, 2))
        assert loader.consumed_samples == 24
    assert same(first, second)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_data_leaves_torchs_random_state_alone(windows: TokenWindows, num_workers: int) -> None:
    before = torch.get_rng_state()
    steps(windows, 2, num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), before)


class CountingReader(MockReader):
    reads = 0

    def tokens(self, start: int, count: int) -> np.ndarray:
        self.reads += 1
        return super().tokens(start, count)


def test_starting_late_reads_no_more_than_starting_early(tmp_path: Path) -> None:
    tokenizer = OneIdPerDocument()
    jsonl_prefix(tmp_path, 2000, tokenizer, num_files=20)
    calls = tokenizer.calls
    prefix = jsonl_prefix(tmp_path, 2000, tokenizer, num_files=20)
    windows = TokenWindows(IndexedReader(prefix), SEQ)
    assert documents(steps(windows, 1, start_sample=1900)[0]) == [
        int(windows.sample(i, 0)[0]) - 3 for i in range(1900, 1906)
    ]
    assert tokenizer.calls == calls
    reader = CountingReader(257, seed=0)
    steps(TokenWindows(reader, SEQ), 2, start_sample=190_000)
    assert reader.reads == 2 * 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_reads_the_same_from_a_worker(tmp_path: Path, num_workers: int) -> None:
    with IndexedWriter(tmp_path / "data", np.dtype("uint16")) as writer:
        writer.add_document([300] * (SEQ + 1))
    windows = TokenWindows(IndexedReader(tmp_path / "data"), SEQ, vocab_size=257)
    with pytest.raises(DataError) as expected:
        windows.window(0)
    with pytest.raises(DataError) as caught:
        steps(windows, 1, num_workers=num_workers)
    assert str(caught.value) == str(expected.value)
    with pytest.raises(DataError) as caught:
        list(ValidationBatches(windows, seq_len=SEQ, local_batch_size=1, num_workers=num_workers))
    assert str(caught.value) == str(expected.value)


def test_closing_ends_the_workers(windows: TokenWindows) -> None:
    with loading(windows, num_workers=2, persistent_workers=True) as loader:
        batches = iter(loader)
        next(batches)
        workers = loader._batches._running._workers
        assert all(worker.is_alive() for worker in workers)
    assert not any(worker.is_alive() for worker in workers)
    loader.close()  # a second time is fine


LOADS_UNTIL_KILLED = """
import signal
from titanish.data.loader import TrainLoader
from titanish.data.windows import MockReader, TokenWindows

if __name__ == "__main__":
    windows = TokenWindows(MockReader(257, seed=0), 8)
    loader = TrainLoader(windows, seed=0, seq_len=8, global_batch_size=2, num_workers=2)
    next(iter(loader))
    print(*(worker.pid for worker in loader._batches._running._workers), flush=True)
    signal.pause()
"""


def test_workers_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOADS_UNTIL_KILLED)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
    rank = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert rank.stdout is not None
    with rank, rank.stdout:
        workers = [os.pidfd_open(int(pid)) for pid in rank.stdout.readline().split()]
        rank.kill()
    assert len(workers) == 2
    for worker in workers:
        ended, _, _ = select.select([worker], [], [], 30)
        assert ended
        os.close(worker)


def test_our_own_mistakes_are_caught(windows: TokenWindows) -> None:
    for wrong, message in [
        ({"seq_len": 9}, "windows of 8 tokens for seq_len 9"),
        ({"batch_ranks": 4}, "6 samples over 4 ranks"),
        ({"batch_rank": 2, "batch_ranks": 2}, "batch rank 2 of 2"),
    ]:
        with pytest.raises(AssertionError, match=message):
            steps(windows, 1, **wrong)
    partial = TokenWindows(MockReader(257, 0, 20), SEQ, keep_partial=True)
    with pytest.raises(AssertionError, match="training takes whole windows only"):
        steps(partial, 1)
    with pytest.raises(AssertionError, match="windows of 8 tokens for seq_len 9"):
        ValidationBatches(partial, seq_len=9, local_batch_size=1)
    with pytest.raises(AssertionError, match="batch rank 1 of 1"):
        ValidationBatches(partial, seq_len=SEQ, local_batch_size=1, batch_rank=1)


def validation_windows(folder: Path, num_tokens: int) -> TokenWindows:
    with IndexedWriter(folder / "valid", np.dtype("uint16")) as writer:
        writer.add_document(list(range(1000, 1000 + num_tokens)))
    return TokenWindows(IndexedReader(folder / "valid"), SEQ, keep_partial=True)


def counted_labels(batches: Sequence[StepBatch]) -> list[int]:
    """The labels that count, each with its input checked: token t is followed by t + 1 in this data."""
    for batch in batches:
        valid = batch["labels"] != -100
        assert (batch["tokens"][valid] + 1 == batch["labels"][valid]).all()
    return [int(label) for batch in batches for label in batch["labels"].flatten() if label != -100]


# From two tokens over one window more or less to several batches with and without a partial window.
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 17, 49, 50, 57, 95])
@pytest.mark.parametrize(("local_batch_size", "batch_ranks"), [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_validation_counts_every_token_after_the_first_once(
    tmp_path: Path, num_tokens: int, local_batch_size: int, batch_ranks: int
) -> None:
    windows = validation_windows(tmp_path, num_tokens)
    ranks = [
        list(
            ValidationBatches(
                windows,
                seq_len=SEQ,
                local_batch_size=local_batch_size,
                batch_rank=rank,
                batch_ranks=batch_ranks,
            )
        )
        for rank in range(batch_ranks)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(b["tokens"].shape == b["labels"].shape == (local_batch_size, SEQ) for r in ranks for b in r)
    labels = [label for batches in ranks for label in counted_labels(batches)]
    assert sorted(labels) == list(range(1001, 1000 + num_tokens))


def test_validation_is_the_same_at_every_pass_and_with_workers(tmp_path: Path) -> None:
    windows = validation_windows(tmp_path, 95)
    batches = ValidationBatches(windows, seq_len=SEQ, local_batch_size=3)
    first = list(batches)
    assert len(batches) == len(first) == 4
    assert same(list(batches), first)
    working = ValidationBatches(
        windows, seq_len=SEQ, local_batch_size=3, num_workers=1, persistent_workers=True
    )
    assert same(list(working), first)
    assert same(list(working), first)
    working.close()


@pytest.mark.parametrize(("asked", "validated"), [(5, 5), (11, 11), (100, 12), (None, 12)])
def test_validation_is_limited_to_the_first_windows(
    tmp_path: Path, asked: int | None, validated: int
) -> None:
    windows = validation_windows(tmp_path, 95)
    batches = ValidationBatches(windows, seq_len=SEQ, local_batch_size=3, max_windows=asked)
    assert len(batches) == len(list(batches)) == -(-validated // 3)
    assert counted_labels(list(batches)) == list(range(1001, min(1001 + 8 * validated, 1095)))


@pytest.mark.parametrize(("local_batch_size", "batch_ranks"), [(4, 1), (2, 2), (1, 4), (3, 2), (5, 1)])
def test_every_layout_validates_on_the_same_tokens(
    tmp_path: Path, local_batch_size: int, batch_ranks: int
) -> None:
    windows = validation_windows(tmp_path, 95)
    ranks = (
        ValidationBatches(
            windows,
            seq_len=SEQ,
            local_batch_size=local_batch_size,
            batch_rank=rank,
            batch_ranks=batch_ranks,
            max_windows=8,
        )
        for rank in range(batch_ranks)
    )
    labels = sorted(label for batches in ranks for label in counted_labels(list(batches)))
    assert labels == list(range(1001, 1065))
