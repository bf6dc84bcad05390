"""What this rank's collectives did before a connection was lost: PyTorch's flight recorder, and its file.

The recorder keeps the last collectives in memory, each with its group, its number in that group, its sizes
and its state. Compared over ranks, the files tell which collective one rank never came to. gloo's are written
here, after the error; NCCL's watchdog writes its own before it ends the process, under the name that the
environment gives it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from torch._C import _distributed_c10d


def record_collectives(size: int, prefix: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have the last `size` collectives remembered; NCCL writes them to `prefix` and its rank.

    To be called before the first process group. Variables that somebody has set stay as they are.
    """
    environment.setdefault("TORCH_FR_BUFFER_SIZE", str(size))
    if size:
        environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        environment.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))


def write_trace(prefix: Path, rank: int) -> Path | None:
    """Write what is remembered as JSON to `prefix` + rank + `.json`; None where there is nothing.

    Raises:
        OSError: the file cannot be written.
    """
    text: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]  # not in torch's stubs
    if b'"entries"' not in text:
        return None
    path = prefix.with_name(f"{prefix.name}{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path
