"""One run at a time in a folder: two would cut each other's metrics and remove each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanish.errors import TitanishError

LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be, for this process; the system lets go of it if the process
    dies.

    Raises:
        TitanishError: another process holds it, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LOCK).open("a+")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TitanishError(
            f"job.dump_folder = {str(folder)!r} cannot be written to: {reason}; name a folder that can"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = stream.read().strip()
            raise TitanishError(
                f"job.dump_folder = {str(folder)!r} is in use by another run (process {holder}); "
                "wait for it, or name another folder"
            ) from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
