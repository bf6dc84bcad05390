"""Checkpoint folders on disk: their names, what makes one complete, and which may be deleted. No torch.

A checkpoint is written under a hidden name and renamed to `step-N` when every byte of it is on disk, so a
folder of that name is complete unless somebody changed it afterwards; its manifest tells.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanish.errors import CheckpointError

FORMAT = 1
"""Raised when a checkpoint of before can no longer be read as it is."""
MANIFEST = "titanish.json"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_PARTIAL = ".partial-step-"


@dataclass(frozen=True)
class Scan:
    """What a checkpoint folder holds: complete steps, ascending, and what cannot be used, with the reason."""

    complete: tuple[int, ...]
    broken: tuple[tuple[Path, str], ...]


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is complete."""
    return folder / f"step-{step}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return folder / f"{_PARTIAL}{step}"


def scan(folder: Path) -> Scan:
    """Look through `folder`; one that does not exist holds nothing."""
    complete: list[int] = []
    broken: list[tuple[Path, str]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            reason = flaw(path)
            if reason is None:
                complete.append(int(match[1]))
            else:
                broken.append((path, reason))
        elif path.name.startswith(_PARTIAL):
            broken.append((path, "its save was interrupted"))
        elif path.name.startswith("step-"):
            broken.append((path, "not a checkpoint: the name must be step-N, a folder"))
    return Scan(tuple(sorted(complete)), tuple(broken))


def flaw(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, or None if it is complete."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    for name, size in manifest["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises:
        CheckpointError: it is missing, unreadable, or of a format that this version does not know.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        form, files = manifest["format"], manifest["files"]
        assert isinstance(files, dict)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AssertionError):
        raise CheckpointError(f"{MANIFEST} is damaged") from None
    if form != FORMAT:
        raise CheckpointError(f"it has format {form}, this version reads format {FORMAT}")
    return dict(manifest)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; leftovers of interrupted saves are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)
    partial = partial_folder(folder, step)
    partial.mkdir()
    return partial


def commit(folder: Path, step: int, about: Mapping[str, Any]) -> Path:
    """Write the manifest of the finished folder, flush everything, and give it its name.

    `about` is stored in the manifest beside the format and the size of every file.
    """
    partial = partial_folder(folder, step)
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in paths}
    text = json.dumps({"format": FORMAT, "step": step, **about, "files": files}, indent=1)
    (partial / MANIFEST).write_text(text)
    for path in [*paths, partial / MANIFEST, *(p for p in partial.rglob("*") if p.is_dir()), partial]:
        _flush(path)
    final = step_folder(folder, step)
    if final.exists():  # only a broken one: a complete one is never written again
        os.replace(final, partial_folder(folder, step).with_name(f"{_PARTIAL}{step}-replaced"))
    os.replace(partial, final)
    _flush(folder)
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)
    return final


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(folder: Path, step: int) -> None:
    """Remove the checkpoint of `step`; it stops being one before its files go."""
    doomed = folder / f"{_PARTIAL}{step}-deleted"
    os.replace(step_folder(folder, step), doomed)
    shutil.rmtree(doomed)


def steps_to_delete(complete: Sequence[int], keep_latest_k: int) -> tuple[int, ...]:
    """Which of the complete steps retention gives up: all but the newest `keep_latest_k`; 0 keeps all."""
    return tuple(sorted(complete)[:-keep_latest_k]) if keep_latest_k else ()
