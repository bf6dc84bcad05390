"""The process group: who this process is among the ranks, how they find each other, how they part.

The launcher (torchrun, or anything that sets the same variables) says who is who; a process started without
one trains alone. Two timeouts hold, a generous one until the first step is done (ranks build, compile and
read at different speeds), then a short one, so that a dead rank ends the others soon.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from titanish.errors import TitanishError
from titanish.runtime.device import Device

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
CLOSE_SECONDS = 20.0

logger = logging.getLogger("titanish")


@dataclass(frozen=True)
class Ranks:
    """Who this process is: its place among all processes and among those of its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Who this process is, by the launcher's variables; a process that has none of them is rank 0 of 1.

    Raises:
        TitanishError: some variables are set and others are not, or one has an impossible value.
    """
    if not any(name in environment for name in RANK_VARIABLES):
        return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    _require(environment, RANK_VARIABLES)
    world_size = _number(environment, "WORLD_SIZE", 1, None)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size)
    return Ranks(
        rank=_number(environment, "RANK", 0, world_size - 1),
        local_rank=_number(environment, "LOCAL_RANK", 0, local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
    )


def start_process_group(device: Device, init_timeout_seconds: float) -> Ranks:
    """Starts the default process group over all ranks and returns who this process is.

    Its timeout is `init_timeout_seconds` until `use_train_timeout`. A single process started without a
    launcher gets a group of its own that opens no port. A group that runs already (a test's, a notebook's) is
    used as it is, and `close` leaves it to whoever started it.

    Raises:
        TitanishError: the launcher's variables are missing or wrong, or not all ranks came in time.
    """
    ranks = read_ranks()
    if dist.is_initialized():
        return Ranks(dist.get_rank(), ranks.local_rank, dist.get_world_size(), ranks.local_world_size)
    timeout = timedelta(seconds=init_timeout_seconds)
    # Bound to its GPU, NCCL connects now, where a failure is a start that failed, and not in the first step.
    bound = device.torch_device if device.type == "cuda" else None
    if not any(name in os.environ for name in RANK_VARIABLES):
        dist.init_process_group(
            device.backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=bound,
        )
    else:
        _require(os.environ, ADDRESS_VARIABLES)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            dist.init_process_group(
                device.backend,
                store=dist.PrefixStore(store_prefix(), store),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=bound,
            )
        except (RuntimeError, ValueError) as error:
            address = ":".join(os.environ[name] for name in ADDRESS_VARIABLES)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TitanishError(
                f"rank {ranks.rank} of {ranks.world_size} could not join the process group at {address} "
                f"(comm.init_timeout_seconds = {init_timeout_seconds:g}): {reason}; check that all ranks "
                "were started and that this machine can reach MASTER_ADDR"
            ) from error
    _Started.here = True
    return ranks


def store_prefix(environment: Mapping[str, str] = os.environ) -> str:
    """Under which name this start keeps its addresses in torchrun's store.

    torchrun's store outlives its restarts, and with it the addresses of ranks that are gone, which new ranks
    would try to reach (https://github.com/pytorch/pytorch/issues/135712). Nodes count restarts each for
    itself, so over several only the launcher can help: see `restarts_fail`.
    """
    alone = environment.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"titanish-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}" if alone else "titanish"


def restarts_fail(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why the restarts that torchrun was asked for would not work, or None."""
    if (
        environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
        or environment.get("GROUP_WORLD_SIZE", "1") == "1"
        or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    ):
        return None
    return (
        f"torchrun --max-restarts={environment['TORCHELASTIC_MAX_RESTARTS']}: over several nodes a restart "
        "finds the addresses of the ranks before it; start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
    )


def use_train_timeout(seconds: float, groups: Iterable[dist.ProcessGroup] = ()) -> None:
    """From here on a collective of the default group or of `groups` that takes longer than `seconds` is an
    error.

    To be called by all ranks after the first step. They wait for each other first, under the long timeout,
    since that step may have taken some of them much longer than others.
    """
    dist.barrier()
    timeout = timedelta(seconds=seconds)
    for group in {dist.group.WORLD, *groups} - {None, dist.GroupMember.NON_GROUP_MEMBER}:
        # Private, and the only way: torch fixes a group's timeout when it is made and offers no setter in
        # public.
        distributed_c10d._set_pg_timeout(timeout, group)


def close(*, failed: bool = False) -> None:
    """Leaves the process group if `start_process_group` started it; returns within `CLOSE_SECONDS` in any
    case.

    After an error (`failed`) communicators are aborted: other ranks may never come to end them together.
    """
    if not (_Started.here and dist.is_initialized()):
        return
    _Started.here = False
    leave = distributed_c10d._abort_process_group if failed else _leave_together
    # In a thread, because destroying waits for collectives that may never end; daemonic, so that it holds up
    # no exit.
    thread = threading.Thread(target=_quietly, args=(leave,), daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        logger.warning(
            f"the process group did not end within {CLOSE_SECONDS:g} s; the process goes on without"
        )


def _leave_together() -> None:
    """No rank takes its connections down while another may still be in its last collective."""
    dist.barrier()
    dist.destroy_process_group()


class _Started:
    """Whether the default group, of which torch keeps one per process, is ours to end."""

    here = False


def _quietly(leave: Callable[[], None]) -> None:
    try:
        leave()
    except Exception as error:  # the group is gone either way, and what matters was reported before
        logger.warning(f"ending the process group: {error}")


def _require(environment: Mapping[str, str], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        given = ", ".join(
            f"{name}={environment[name]}"
            for name in (*RANK_VARIABLES, *ADDRESS_VARIABLES)
            if name in environment
        )
        raise TitanishError(
            f"{', '.join(missing)} not set, though {given} is: start ranks with run_train.sh or with "
            "torchrun --nproc_per_node=N -m titanish.train, which set them all; for one process without "
            "either, unset all of them"
        )


def _number(environment: Mapping[str, str], name: str, low: int, high: int | None) -> int:
    text = environment[name]
    number = int(text) if text.strip().isdecimal() else low - 1
    if number < low or (high is not None and number > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise TitanishError(
            f"{name} = {text!r}: must be a number {limits}; start ranks with run_train.sh or torchrun, "
            "which set it"
        )
    return number
