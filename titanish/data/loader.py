"""Batches for training and validation: which windows one rank reads, and the workers that read them.

A loader item is one rank's whole optimizer step, so that nothing about the order of the data depends on
microbatches or workers: the samples of a step are `global_batch_size` consecutive ones, and batch rank b of R
reads the b-th of R equal, contiguous parts of them. The only state is how many samples were consumed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanish.data.windows import TokenWindows
from titanish.errors import DataError

IGNORED_LABEL = -100
"""The label of a position that counts in no loss; torch's own default for cross-entropy."""


class StepBatch(TypedDict):
    """Inputs and labels of the same shape (samples, seq), int64; labels are the inputs' next tokens."""

    tokens: Tensor
    labels: Tensor


class TrainLoader:
    """One rank's batches, one `StepBatch` of `global_batch_size // batch_ranks` samples per step, without
    end.

    Iterating starts at `start_sample`, any count of samples already consumed; nothing before it is read.
    `consumed_samples` is the count after the last batch handed out, whatever workers have read ahead. The
    remaining keywords are those of `training.dataloader`. A window that cannot be used raises the same
    DataError with workers as without.
    """

    def __init__(
        self,
        windows: TokenWindows,
        *,
        seed: int,
        seq_len: int,
        global_batch_size: int,
        batch_rank: int = 0,
        batch_ranks: int = 1,
        start_sample: int = 0,
        num_workers: int = 0,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        assert windows.seq_len == seq_len, f"windows of {windows.seq_len} tokens for seq_len {seq_len}"
        assert not windows.keep_partial, "training takes whole windows only"
        assert global_batch_size % batch_ranks == 0, f"{global_batch_size} samples over {batch_ranks} ranks"
        assert 0 <= batch_rank < batch_ranks, f"batch rank {batch_rank} of {batch_ranks}"
        self.consumed_samples = self._start_sample = start_sample
        self._global_batch_size = global_batch_size
        self._batches = _Batches(
            _TrainSteps(windows, seed, global_batch_size // batch_ranks, batch_rank),
            _SamplesFrom(start_sample, global_batch_size),
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
        )

    def __iter__(self) -> Iterator[StepBatch]:
        self.consumed_samples = self._start_sample
        for batch in self._batches:
            self.consumed_samples += self._global_batch_size
            yield batch

    def close(self) -> None:
        """Ends the workers; the loader cannot be used afterwards."""
        self._batches.close()


class ValidationBatches:
    """The same batches at every pass: the windows in order, each token after the first a label exactly once.

    Batch j holds windows [j * n, (j + 1) * n) with n = `local_batch_size` * `batch_ranks`, of which a rank
    reads its contiguous part: tokens and labels of shape (local_batch_size, seq). Rows that a partial last
    window or the end of the data leaves empty have labels of -100, so that all ranks run equally many
    forward passes. `max_windows` limits the data to its first windows, whatever the ranks and batches; None
    takes all.
    """

    def __init__(
        self,
        windows: TokenWindows,
        *,
        seq_len: int,
        local_batch_size: int,
        batch_rank: int = 0,
        batch_ranks: int = 1,
        max_windows: int | None = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        assert windows.seq_len == seq_len, f"windows of {windows.seq_len} tokens for seq_len {seq_len}"
        assert 0 <= batch_rank < batch_ranks, f"batch rank {batch_rank} of {batch_ranks}"
        count = windows.num_windows if max_windows is None else min(max_windows, windows.num_windows)
        self._num_batches = -(-count // (local_batch_size * batch_ranks))
        self._batches = _Batches(
            _ValidationSteps(windows, count, local_batch_size, batch_rank, batch_ranks),
            range(self._num_batches),
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
        )

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._batches)

    def close(self) -> None:
        """Ends the workers; the batches cannot be used afterwards."""
        self._batches.close()


class _TrainSteps(Dataset):
    """Item s: this rank's part of the step whose first global sample is s."""

    def __init__(self, windows: TokenWindows, seed: int, samples: int, batch_rank: int) -> None:
        self.windows, self.seed, self.samples, self.batch_rank = windows, seed, samples, batch_rank

    def __getitem__(self, step_start: int) -> StepBatch | _Refusal:
        first = step_start + self.batch_rank * self.samples
        rows = np.empty((self.samples, self.windows.seq_len + 1), np.int64)
        try:
            for row in range(self.samples):
                rows[row] = self.windows.sample(first + row, self.seed)
        except DataError as error:
            return _Refusal(str(error))
        return _shift(rows[:, :-1], rows[:, 1:])


class _ValidationSteps(Dataset):
    """Item j: this rank's part of validation batch j, of the first `count` windows."""

    def __init__(
        self, windows: TokenWindows, count: int, local_batch_size: int, batch_rank: int, batch_ranks: int
    ) -> None:
        self.windows, self.count, self.rows = windows, count, local_batch_size
        self.batch_rank, self.batch_ranks = batch_rank, batch_ranks

    def __getitem__(self, batch: int) -> StepBatch | _Refusal:
        first = (batch * self.batch_ranks + self.batch_rank) * self.rows
        tokens = np.zeros((self.rows, self.windows.seq_len), np.int64)
        labels = np.full_like(tokens, IGNORED_LABEL)
        try:
            for row in range(min(self.rows, self.count - first)):
                ids = self.windows.window(first + row)
                tokens[row, : len(ids) - 1] = ids[:-1]
                labels[row, : len(ids) - 1] = ids[1:]
        except DataError as error:
            return _Refusal(str(error))
        return _shift(tokens, labels)


class _Refusal:
    """A DataError on its way from a worker.

    Raised in the worker, it would arrive with the worker's traceback pasted into its message.
    """

    def __init__(self, message: str) -> None:
        self.message = message


def _shift(tokens: np.ndarray, labels: np.ndarray) -> StepBatch:
    # Contiguous copies: two views of one array would each carry the whole of it to another process.
    return StepBatch(
        tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
    )


class _SamplesFrom:
    """The first sample of every step from `start` on; each pass over it begins at `start` again."""

    def __init__(self, start: int, stride: int) -> None:
        self.start, self.stride = start, stride

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start, self.stride)


class _Batches:
    """A StatefulDataLoader over whole items that raises refusals and can be closed."""

    def __init__(
        self,
        dataset: Dataset,
        items: Iterable[int],
        *,
        num_workers: int,
        persistent_workers: bool,
        pin_memory: bool,
        prefetch_factor: int | None,
    ) -> None:
        with warnings.catch_warnings():
            # torchdata 0.11 calls this in its constructor; torch 2.13 has deprecated it.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=None,
                sampler=items,
                collate_fn=_as_is,
                num_workers=num_workers,
                # Only workers can persist and read ahead; without any the two keys mean nothing.
                persistent_workers=persistent_workers and num_workers > 0,
                prefetch_factor=prefetch_factor if num_workers > 0 else None,
                # Without an accelerator pinned memory is of no use, and torch warns about it.
                pin_memory=pin_memory and torch.accelerator.is_available(),
                multiprocessing_context=_worker_context() if num_workers > 0 else None,
                worker_init_fn=_end_with_parent,
                # Each pass draws a seed for its workers; it must not come from the generator of dropout.
                generator=torch.Generator(),
            )
        self._running: Any = None

    def __iter__(self) -> Iterator[StepBatch]:
        self._running = iter(self._loader)
        for item in self._running:
            if isinstance(item, _Refusal):
                raise DataError(item.message)
            yield item

    def close(self) -> None:
        # torch ends workers when the iterator is collected, which a stored traceback can put off for long.
        shutdown = getattr(self._running, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._running = None
        self._loader._iterator = None


def _as_is(item: Any) -> Any:
    return item


def _end_with_parent(worker_id: int) -> None:
    """Ends this worker when the process that it loads for dies, also by a kill.

    torch's own watch looks at the parent's process id, which is the fork server's here; and the server
    stays for as long as it has workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def _worker_context() -> multiprocessing.context.BaseContext:
    """Returns the way workers are started: by a fork server, which holds no threads and no locks.

    Plain fork (torch's default on Linux) copies this process in whatever state OpenMP, gloo or NCCL
    threads, an asynchronous save or a logger are in: a lock held at that moment is held forever in the
    worker. The server is a fresh process that imports torch once; what workers need is sent to them, and
    that is a path and numbers.
    """
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])
    return context
