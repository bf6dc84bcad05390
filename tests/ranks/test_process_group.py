"""The train timeout, over ranks: one that does not come ends the others' wait, in every group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from titanish.runtime.device import Device
from titanish.runtime.process_group import Ranks, start_process_group, use_train_timeout
from titanish.testing.ranks import RankPool

CPU = Device(type="cpu", index=0, backend="gloo", name="CPU", peak_flops=None)


def wait_for_a_rank_that_does_not_come() -> list[str]:
    group = dist.new_group([0, 1])
    use_train_timeout(0.5, [group])
    store = dist.distributed_c10d._get_default_store()
    errors = []
    if dist.get_rank() == 0:
        for each in (dist.group.WORLD, group):
            try:
                dist.all_reduce(torch.ones(1), group=each)
            except RuntimeError as error:
                errors.append(str(error))
        store.set("done", "yes")
    store.wait(["done"])
    return errors


def test_a_rank_that_does_not_come_ends_the_wait_in_every_group(pool: Callable[[int], RankPool]) -> None:
    errors, _ = pool(2).run(wait_for_a_rank_that_does_not_come)
    assert len(errors) == 2
    assert all("Timed out waiting 500ms" in error for error in errors)


def join() -> Ranks:
    return start_process_group(CPU, 30)


def test_ranks_that_have_a_group_use_it(pool: Callable[[int], RankPool]) -> None:
    assert pool(2).run(join) == [Ranks(0, 0, 2, 2), Ranks(1, 1, 2, 2)]
