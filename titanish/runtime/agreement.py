"""One decision for all ranks, without waiting for a device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Agreement:
    """The largest number that any rank has put in, the same on all ranks at the same call.

    With several ranks it is the numbers of the call before that are answered: they travel over the CPU (gloo)
    while the step computes, so that nobody waits for more than the slowest rank's previous step. All ranks
    must make one together.
    """

    def __init__(self) -> None:
        self._alone = dist.get_world_size() == 1
        self.group: dist.ProcessGroup | None = None
        if not self._alone:
            # A group of its own only where the ranks talk over something else: each has threads.
            over_cpu = dist.get_backend() == "gloo"
            self.group = dist.group.WORLD if over_cpu else dist.new_group(backend="gloo")
        self._pending: tuple[Tensor, dist.Work] | None = None

    def exchange(self, number: int) -> int:
        """Put `number` in, take out the largest one of the call before (of this call on a single rank)."""
        if self._alone:
            return number
        agreed = 0
        if self._pending is not None:
            largest, work = self._pending
            work.wait()
            agreed = int(largest)
        largest = torch.tensor(number, dtype=torch.int64)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None, "every rank is in the group"
        self._pending = largest, work
        return agreed
