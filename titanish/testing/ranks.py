"""Functions run as ranks 0..n-1 on CPU (gloo), by worker processes that stay alive between calls.

Starting ranks means importing torch in each of them, which takes many times longer than a typical check over
several ranks. `RankPool` pays for it once: every call gets a fresh process group on warm workers, and a large
table of "N ranks equal one rank" tests becomes affordable.

Nothing can hang: whatever goes wrong on a rank (an exception, death, a result that cannot be sent, silence)
ends as a `RankFailure` that names the rank, and workers that may be stuck in a collective are replaced on the
next call.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.util  # registers its exit hook, which must stand before ours: see `_close_all`
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

GROUP_TIMEOUT_SECONDS = 60.0
START_TIMEOUT_SECONDS = 300.0  # many ranks that import torch at once on two cores are slow, not stuck
GRACE_SECONDS = 1.0  # how long ranks may still answer once one of them has failed


class RankFailure(AssertionError):
    """A rank raised, died or did not answer; the message says which and holds its traceback, if there is
    one."""


@dataclass(frozen=True)
class _Answer:
    """What one rank sends back; `value` is the pickled result, or the failure's text if not `ok`."""

    ok: bool
    value: bytes | str
    failed_at: float = 0.0  # monotonic clock, which all processes of a machine share


class RankPool:
    """`world_size` worker processes that run one function after another as ranks 0..n-1.

    The function must be importable by its name (defined at module level), since the workers are spawned. Each
    call gets a fresh gloo group, torch seeded with 0, the variables RANK, LOCAL_RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE, and the environment and folder that the pool was made in; only what a function leaves in
    module globals goes on to the next. Workers may start processes of their own, and end with the process
    that made them.
    """

    def __init__(self, world_size: int, timeout_s: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._ready = False
        _OPEN_POOLS.add(self)
        self._start()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; returns the results in rank order.

        Raises:
            RankFailure: the function cannot be sent, or a rank raised, died, returned what cannot be sent, or
                did not answer within `timeout_s`. The rank that failed first is the one reported. Unless all
                ranks have answered, the workers are ended and the next call starts new ones.
        """
        name = getattr(fn, "__qualname__", repr(fn))
        try:
            job = pickle.dumps((fn, args, kwargs))
        except Exception as error:
            raise RankFailure(
                f"{name} cannot be sent to the ranks: {error}; define it at module level and pass arguments "
                "that can be pickled"
            ) from error
        try:
            with tempfile.TemporaryDirectory(prefix="titanish-ranks-") as folder:
                return self._run(name, job, str(Path(folder) / "store"))
        except RankFailure:
            raise
        except BaseException:  # an interrupt, say: the ranks are in the middle of something
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers and whatever they started; a later `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._ready = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._workers = [_Worker(rank, self.world_size) for rank in range(self.world_size)]

    def _run(self, name: str, job: bytes, store: str) -> list[Any]:
        if not self._workers:
            self._start()
        if not self._ready:
            self._collect("starting the ranks", START_TIMEOUT_SECONDS)
            self._ready = True
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead worker's pipe: found out, with its exit code, below
                worker.connection.send((store, job))
        results = []
        for rank, payload in enumerate(self._collect(name, self.timeout_s)):
            try:
                results.append(pickle.loads(payload))
            except Exception as error:
                raise RankFailure(
                    f"{name}: the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
                ) from error
        return results

    def _collect(self, name: str, timeout_s: float) -> list[bytes]:
        """One answer from each rank, in rank order; a `RankFailure` that tells the first cause otherwise."""
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(answers) < self.world_size:
            missing = [worker for worker in self._workers if worker.rank not in answers]
            # Asked before reading, so that the last words of a rank that dies in between are not lost. The
            # short wait is for deaths that no pipe tells: a child of the dead worker may hold the pipe open.
            dead = [worker for worker in missing if not worker.process.is_alive()]
            wait([worker.connection for worker in missing], timeout=0 if dead else 0.25)
            for worker in missing:
                answer = worker.answer()
                if answer is not None:
                    answers[worker.rank] = answer
            dead = [worker for worker in dead if worker.rank not in answers]
            if dead:
                # Its peers fail too, with lost connections, and perhaps sooner: death is the cause.
                self.close()
                raise RankFailure(f"{name}: " + "; ".join(worker.cause_of_death() for worker in dead))
            if not failed and any(not answer.ok for answer in answers.values()):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                self.close()
                break
        return _judge(name, self.world_size, answers, timeout_s)


def _judge(name: str, world_size: int, answers: dict[int, _Answer], timeout_s: float) -> list[bytes]:
    """The results in rank order, or the `RankFailure` that the answers amount to."""
    failures = sorted((answer.failed_at, rank) for rank, answer in answers.items() if not answer.ok)
    if failures:
        rank = failures[0][1]
        also = f" (and then on {[other for _, other in failures[1:]]})" if len(failures) > 1 else ""
        raise RankFailure(f"{name} failed on rank {rank} of {world_size}{also}:\n{answers[rank].value!s}")
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        raise RankFailure(f"{name}: no answer from rank(s) {silent} within {timeout_s:g} s")
    payloads = [answers[rank].value for rank in range(world_size)]
    return [payload for payload in payloads if isinstance(payload, bytes)]


class _Worker:
    """One rank's process, seen from the pool."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        # spawn: a fork of a process in which torch has threads can hang.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not daemonic: a daemonic process may not have children, and DataLoader workers are children.
        self.process = context.Process(
            target=_serve, args=(theirs, rank, world_size), name=f"rank{rank}", daemon=False
        )
        self.process.start()
        theirs.close()  # so that the end of the worker ends the pipe

    def answer(self) -> _Answer | None:
        """What the rank has sent, None if nothing has arrived."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):  # the worker is gone: `cause_of_death` tells more
            return None

    def cause_of_death(self) -> str:
        code = self.process.exitcode
        assert code is not None, "asked of a worker that lives"
        if code < 0:
            return f"rank {self.rank} was ended by signal {signal.Signals(-code).name}"
        return f"rank {self.rank} ended with exit code {code}"

    def kill(self) -> None:
        """Ends the process with its children; it may be stuck in a collective, so nothing gentler would
        do."""
        if self.process.pid is not None:
            # The worker leads a session of its own, unless it has not come so far.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        self.connection.close()


_OPEN_POOLS: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what was left open. Runs before multiprocessing's own exit hook, which would wait for the
    workers."""
    for pool in list(_OPEN_POOLS):
        pool.close()


# ---------------------------------------------------------------------------------------------- in the worker


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    """Runs jobs as `rank` until the pool's end of the pipe is closed."""
    os.setsid()  # with its children it can then be ended at once, and Ctrl-C is the pool's to act on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # for children; this process's torch has read it already
    torch.set_num_threads(1)
    # Without a name gloo looks up the host's address, which not every machine can resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    environment, folder = dict(os.environ), os.getcwd()
    caches = [
        found
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("torch.distributed")
    ]
    connection.send(_Answer(ok=True, value=b""))  # torch is imported: ready
    while True:
        try:
            store, job = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        _reset(environment, folder, caches)
        connection.send(_answer(job, store, rank, world_size))


def _answer(job: bytes, store: str, rank: int, world_size: int) -> _Answer:
    """Runs one job in a process group of its own.

    The group stays until the next job, when all ranks have answered. To destroy it now could break a
    collective that another rank is still in; after a failure those lost connections would be reported instead
    of the cause.
    """
    try:
        fn, args, kwargs = pickle.loads(job)
        if gc.get_freeze_count() == 0:
            gc.freeze()  # modules, which every later collection would walk through
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
        )
        torch.manual_seed(0)
        result = fn(*args, **kwargs)
    except BaseException:
        failed_at = time.monotonic()
        return _Answer(ok=False, value=traceback.format_exc(), failed_at=failed_at)
    try:
        payload = pickle.dumps(result)
    except Exception as error:
        why = f"its result, a {type(result).__name__}, cannot be sent back: {type(error).__name__}: {error}"
        return _Answer(ok=False, value=why, failed_at=time.monotonic())
    return _Answer(ok=True, value=payload)


def _reset(environment: dict[str, str], folder: str, caches: list[Any]) -> None:
    """Undoes what the last job may have left in this process."""
    if dist.is_initialized():
        # A group whose connections are broken says so here, after the failure was reported.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    _forget_meshes(caches)
    gc.enable()
    gc.collect()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def _forget_meshes(caches: list[Any]) -> None:
    """Empties DTensor's caches of sharding and redistribution plans.

    Their keys hold device meshes, and a group lives, with its threads that never rest, as long as a mesh of
    it does, also when it was destroyed: after a few jobs those threads would take half the machine. The two
    functions are private in PyTorch 2.11 to 2.13; nothing public empties what they do.
    """
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cache in caches:
        cache.cache_clear()


def _end_with_parent() -> None:
    """Ends this process once the one that made it is gone, also when a job is stuck in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by multiprocessing"
    parent.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
