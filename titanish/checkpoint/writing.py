"""Writing DCP folders so that a failure tells its cause.

When a write fails, torch's zip writer still closes its file, and closing fails on a check of its own
("unexpected pos 704 vs 598") that hides the full disk or the lost permission behind it.
"""

from __future__ import annotations

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class PlainWriter(FileSystemWriter):
    """A `FileSystemWriter` that raises the system's error where there is one."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Named here: other ranks see what is pickled, and that has no context.
            raise _cause(error) from error


def _cause(error: BaseException) -> BaseException:
    """The first system error behind `error`, or `error` itself."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError):
            return behind
        behind = behind.__cause__ or behind.__context__
    return error
