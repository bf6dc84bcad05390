"""How a rank that fails is heard: its own error first, once, and what the next start will do."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titanish.checkpoint.store import scan, step_folder
from titanish.errors import TitanishError

if TYPE_CHECKING:
    from titanish.config.schema import Checkpoint

# What gloo and NCCL say when another rank is gone or silent: they have no type of error for it.
LOST_CONNECTION = ("Connection reset", "Connection closed", "Timed out waiting", "Broken pipe")


class LostRankError(TitanishError):
    """Another rank is gone or silent; what is wrong is its to say."""


def in_words(error: BaseException) -> BaseException:
    """A lost connection as one sentence: its own error is another rank's to report. Others stay as they
    are."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(sign in text for sign in LOST_CONNECTION):
        return LostRankError(
            "lost the connection to another rank, which ended or did not answer within "
            f"comm.train_timeout_seconds; its own error stands above or in the launcher's report "
            f"({text.splitlines()[0][:200]})"
        )
    return error


def wait_for_turn(local_rank: int) -> None:
    """Lets an error that all ranks have be reported by the first of them.

    They cannot ask each other, but the launcher ends the rest as soon as one rank has ended. A rank that is
    alone with its error is heard a little later.
    """
    if local_rank:
        time.sleep(2 + local_rank / 4)


def how_to_go_on(
    dump_folder: str, checkpoint: Checkpoint, environment: Mapping[str, str] = os.environ
) -> str:
    """Where the next start begins, in a sentence."""
    restart = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    start = f"torchrun's restart {restart} of {restarts}" if restart <= restarts else "the same command"
    if not checkpoint.enable:
        return f"{start} starts at step 0: checkpoint.enable is off, and nothing was saved"
    folder = Path(dump_folder) / checkpoint.folder
    complete = scan(folder).complete
    if not complete:
        return f"{start} starts at step 0: there is no complete checkpoint in {folder}"
    last = f"step {complete[-1]}, the last complete checkpoint ({step_folder(folder, complete[-1])})"
    if checkpoint.load_step in (-1, complete[-1]):
        return f"{start} goes on from {last}"
    return (
        f"{start} goes on from step {checkpoint.load_step} again, as checkpoint.load_step says; "
        f"with -1 from {last}"
    )
