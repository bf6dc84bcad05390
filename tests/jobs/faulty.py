"""`titanish.train` with a fault on rank 1 alone, at its first start: FAULT in the environment names it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from titanish.errors import DataError


def _die(*args: Any, **keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _unreadable(*args: Any, **keywords: Any) -> None:
    raise DataError("tokens.bin cannot be read: Input/output error")


def _at_step_3(original: Any) -> Any:
    def update(job: Any, *args: Any) -> Any:
        if job.state.step == 2:
            _die()
        return original(job, *args)

    return update


def _wrong_state(original: Any) -> Any:
    def resume(*args: Any) -> Any:
        original(*args)
        raise DataError("the loader cannot start at sample -7")

    return resume


def main() -> int:
    import torch.distributed.checkpoint as dcp

    import titanish.train.__main__ as train
    import titanish.train.assemble
    import titanish.train.job

    faults = {
        "data": lambda: patch.object(train, "prepare_data", _unreadable),
        "loader": lambda: patch.object(
            titanish.train.assemble, "resume", _wrong_state(titanish.train.assemble.resume)
        ),
        "killed-in-step-3": lambda: patch.object(
            titanish.train.job, "update", _at_step_3(titanish.train.job.update)
        ),
        "killed-in-save": lambda: patch.object(dcp, "save", _die),
    }
    if os.environ["RANK"] != "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return train.main(sys.argv[1:])
    with faults[os.environ["FAULT"]]():
        return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
