"""Checkpoint folders on disk: their names, what makes one complete, and which may be deleted. No torch.

A checkpoint is written under a hidden name and renamed to `step-N` when every byte of it is on disk, so a
folder of that name is complete unless somebody changed it afterwards; its manifest tells.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from titanish.errors import CheckpointError

logger = logging.getLogger("titanish")

FORMAT = 1
"""Raised when a checkpoint of before can no longer be read as it is."""
MANIFEST = "titanish.json"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_PARTIAL = ".partial-step-"
_SUPERSEDED = "superseded-"


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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{MANIFEST} is damaged") from None
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if _is_count(form) and form != FORMAT:
        raise CheckpointError(f"it has format {form}, this version reads format {FORMAT}")
    if form is None or not _is_sound(manifest, path.name):
        raise CheckpointError(f"{MANIFEST} is damaged")
    return dict(manifest)


def _is_sound(manifest: Mapping[str, Any], name: str) -> bool:
    """Whether everything that is read from a manifest of this format, of the folder `name`, has its type."""
    files = manifest.get("files")
    return (
        all(_is_count(manifest.get(key)) for key in ("format", "step", "tokens_seen", "samples_seen"))
        and name == f"step-{manifest['step']}"
        and all(isinstance(manifest.get(key, {}), dict) for key in ("model", "mesh", "data"))
        and isinstance(manifest.get("optimizer", ""), str)
        and isinstance(files, dict)
        and ".metadata" in files
        and all(_stays_inside(file) and _is_count(size) for file, size in files.items())
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stays_inside(name: str) -> bool:
    """Whether `name` is a file's path within a folder, one that the system can be asked for."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and bool(path.parts) and ".." not in path.parts


def probe(folder: Path) -> None:
    """Make `folder` and a file in it, which is removed again.

    Raises:
        CheckpointError: the name cannot be a folder's, or something else has it.
        OSError: the system refuses.
    """
    if "\0" in str(folder):
        raise CheckpointError("the name holds a NUL character")
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError("it is a link to nothing")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError("it is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as file:
        file.write(b"x")


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; leftovers of interrupted saves are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
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
    if os.path.lexists(final):  # only a broken one: a complete one is never written again
        os.replace(final, _free(folder, f"{_PARTIAL}{step}-replaced"))
    os.replace(partial, final)
    _flush(folder)
    _clear(folder)
    return final


def _clear(folder: Path) -> None:
    """Remove what interrupted saves and deletions left; what cannot be removed is in nobody's way."""
    for path in sorted(folder.glob(f"{_PARTIAL}*")):
        try:
            _remove(path)
        except OSError as error:
            logger.warning(f"{path} could not be removed: {error.strerror or error}")


def _remove(path: Path) -> None:
    """Remove a folder with what is in it, a file, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _free(folder: Path, name: str) -> Path:
    """`name` in `folder`, numbered if it is taken."""
    path, number = folder / name, 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{name}-{number}"
    return path


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(folder: Path, step: int) -> None:
    """Remove the checkpoint of `step`; it stops being one before its files go."""
    doomed = _free(folder, f"{_PARTIAL}{step}-deleted")
    os.replace(step_folder(folder, step), doomed)
    _remove(doomed)


def set_aside(folder: Path, step: int) -> Path:
    """Give the checkpoint of `step` a name that no resume looks at, and return where it is then."""
    aside = _free(folder, f"{_SUPERSEDED}{step}")
    os.replace(step_folder(folder, step), aside)
    _flush(folder)
    return aside


def steps_to_delete(complete: Sequence[int], keep_latest_k: int) -> tuple[int, ...]:
    """Which of the complete steps retention gives up: all but the newest `keep_latest_k`; 0 keeps all."""
    return tuple(sorted(complete)[:-keep_latest_k]) if keep_latest_k else ()
