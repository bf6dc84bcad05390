"""The process group of one process, and what is said when the launcher's variables do not fit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanish.errors import TitanishError
from titanish.runtime import process_group
from titanish.runtime.device import Device
from titanish.runtime.process_group import (
    ADDRESS_VARIABLES,
    RANK_VARIABLES,
    Ranks,
    close,
    read_ranks,
    restarts_fail,
    start_process_group,
    store_prefix,
    use_train_timeout,
)

CPU = Device(type="cpu", index=0, backend="gloo", name="CPU", peak_flops=None)
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*RANK_VARIABLES, *ADDRESS_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    yield
    close()


def test_ranks_are_read_from_the_launchers_variables() -> None:
    assert read_ranks(TORCHRUN) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)


def test_without_any_variable_a_process_is_alone() -> None:
    assert read_ranks({"HOME": "/root"}) == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)


def test_a_missing_variable_is_named_with_what_to_start_instead() -> None:
    some = {"RANK": "0", "WORLD_SIZE": "4"}
    expected = (
        r"LOCAL_RANK, LOCAL_WORLD_SIZE not set, though RANK=0, WORLD_SIZE=4 is: .*run_train\.sh or .*torchrun"
    )
    with pytest.raises(TitanishError, match=expected):
        read_ranks(some)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "4", "from 0 to 3"),
        ("RANK", "-1", "from 0 to 3"),
        ("LOCAL_RANK", "2", "from 0 to 1"),
        ("WORLD_SIZE", "0", "of at least 1"),
        ("WORLD_SIZE", "four", "of at least 1"),
        ("LOCAL_WORLD_SIZE", "8", "from 1 to 4"),
    ],
)
def test_an_impossible_variable_is_named_with_its_limits(name: str, value: str, rule: str) -> None:
    with pytest.raises(TitanishError, match=f"^{name} = '{value}': must be a number {rule}; .*torchrun"):
        read_ranks({**TORCHRUN, name: value})


def test_one_process_gets_a_group_that_meshes_and_collectives_work_in() -> None:
    assert start_process_group(CPU, 30) == Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))
    total = torch.full((2,), 5.0)
    dist.all_reduce(total, group=mesh["tp"].get_group())
    use_train_timeout(30, [mesh["tp"].get_group()])
    dist.all_reduce(total)
    assert total.tolist() == [5.0, 5.0]
    close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("failed", [False, True])
def test_a_group_can_be_started_again_after_it_was_closed(failed: bool) -> None:
    start_process_group(CPU, 30)
    close(failed=failed)
    close(failed=failed)  # nothing is left to close, and that is no error
    start_process_group(CPU, 30)
    assert dist.get_world_size() == 1


def test_a_group_that_runs_already_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert start_process_group(CPU, 30).world_size == 1
        close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_without_an_address_ranks_are_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TitanishError, match=r"^MASTER_ADDR, MASTER_PORT not set, though RANK=3, "):
        start_process_group(CPU, 30)


def test_a_rank_that_cannot_join_says_where_and_how_long_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise dist.DistNetworkError("The client socket has timed out\nframe #0: ...")

    monkeypatch.setattr(dist, "rendezvous", refuse)
    for name, value in {**TORCHRUN, "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TitanishError) as caught:
        start_process_group(CPU, 7)
    assert str(caught.value) == (
        "rank 3 of 4 could not join the process group at node7:29500 (comm.init_timeout_seconds = 7): "
        "The client socket has timed out; check that all ranks were started and that this machine can reach "
        "MASTER_ADDR"
    )


def test_a_restart_on_one_node_keeps_its_addresses_under_another_name() -> None:
    assert store_prefix({}) == store_prefix({"TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "1"})
    assert store_prefix({"TORCHELASTIC_RESTART_COUNT": "1"}) != store_prefix({})
    several = {"GROUP_WORLD_SIZE": "2"}  # of which each counts for itself
    assert store_prefix({**several, "TORCHELASTIC_RESTART_COUNT": "1"}) == store_prefix(several)


def test_restarts_over_several_nodes_that_share_the_launchers_store_are_warned_of() -> None:
    risky = {
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    why = restarts_fail(risky)
    assert why is not None
    assert why.startswith("torchrun --max-restarts=3: over several nodes a restart finds the addresses")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in why
    for name, value in {
        "TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }.items():  # fmt: skip
        assert restarts_fail({**risky, name: value}) is None
    assert restarts_fail({}) is None


def test_close_returns_though_the_group_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_process_group(CPU, 30)
    ended, let_go = threading.Event(), threading.Event()
    destroy = dist.destroy_process_group

    def hang() -> None:
        let_go.wait(30)
        destroy()
        ended.set()

    monkeypatch.setattr(dist, "destroy_process_group", hang)
    monkeypatch.setattr(process_group, "CLOSE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, logger="titanish"):
        close()
    assert "the process group did not end within 0.01 s" in caplog.text
    let_go.set()
    assert ended.wait(30)


def test_an_error_while_closing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_process_group(CPU, 30)
    destroy = dist.destroy_process_group

    def fail() -> None:
        destroy()
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with caplog.at_level(logging.WARNING, logger="titanish"):
        close()
    assert "ending the process group: connection reset by peer" in caplog.text
