"""Tokenizes a text source once into a cache, and finds it there from then on.

The name of the result is a hash over everything that decides its content (the tokenizer, BOS and EOS, the
text field, and every file's name and content), so nothing stale can be found and nothing has to be
invalidated. The content hashes are themselves remembered by path, size and modification time: a start on
unchanged data reads directory entries only. Concurrent starts (the ranks of a node, jobs on a shared disk)
take turns on a file lock: the first builds, the others find the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from titanish.data.indexed import (
    PARTIAL_SUFFIX,
    IndexedReader,
    IndexedWriter,
    idx_path,
    token_dtype,
)
from titanish.data.sources import SourceFile, SourceReport, TextSource
from titanish.data.tokenizer import Tokenizer, edge_ids
from titanish.errors import DataError

_Stamp = tuple[int, int]
"""A file's size and its modification time in nanoseconds."""

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of every cache key; raised when the same input would give other tokens."""

# A batch is large enough to keep all cores busy and small enough that two fit in memory easily.
_BATCH_DOCUMENTS = 4096
_BATCH_CHARACTERS = 1 << 24
# A file may change twice within one tick of a file system's clock: only hashes of older files are remembered.
_SETTLED_NS = 2_000_000_000
# What a killed build leaves: parts of a pair, its summary, or the memory of hashes. The folder may be the
# user's own and hold other programs' files, so nothing else is ever deleted.
_LEFTOVER = re.compile(
    rf"(?P<owner>(?:python_stdlib|text|hashes)-[0-9a-f]{{32}})"
    rf"\.(?:bin|idx|lengths|documents|json)\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}"
)


def prepare(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    add_bos: bool,
    add_eos: bool,
    cache_dir: str | Path | None = None,
) -> Path:
    """Returns the prefix of the `.bin`/`.idx` pair that holds the source's documents, building it if need be.

    The prefix's name is the content's fingerprint. `cache_dir` defaults to $TITANISH_CACHE or
    ~/.cache/titanish.
    """
    edge_ids(tokenizer, add_bos=add_bos, add_eos=add_eos)  # a missing special token is named before any work
    folder = _cache_folder(cache_dir)
    with _cache_errors(folder):
        hashes, stamps = _content_hashes(source.files, folder, _digest(str(source.root), source.setting))
        key = _digest(
            FORMAT_VERSION,
            tokenizer.fingerprint,
            add_bos,
            add_eos,
            source.text_field,
            [(file.name, content) for file, content in zip(source.files, hashes, strict=True)],
        )
        prefix = folder / f"{source.dataset}-{key[:32]}"
        if _is_complete(prefix):
            _log_reuse(prefix)
            return prefix
        with _locked(prefix, waiting_for="another start that prepares the same data"):
            if _is_complete(prefix):
                _log_reuse(prefix)
                return prefix
            _remove_leftovers(folder, prefix)
            _build(source, stamps, tokenizer, prefix, add_bos=add_bos, add_eos=add_eos)
    return prefix


def default_cache_dir() -> Path:
    """Returns $TITANISH_CACHE, or ~/.cache/titanish where that is not set."""
    return Path(os.environ.get("TITANISH_CACHE") or "~/.cache/titanish").expanduser()


def _build(
    source: TextSource,
    stamps: list[_Stamp],
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    add_bos: bool,
    add_eos: bool,
) -> None:
    started = time.perf_counter()
    report = SourceReport()
    total_bytes = sum(size for size, _ in stamps)
    logger.info("preparing %s: %d files, %.1f MB", source.dataset, len(stamps), total_bytes / 1e6)
    with (
        IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer,
        _progress(source.dataset, total_bytes) as show,
    ):
        for arrays in _tokenized(source, tokenizer, report, add_bos=add_bos, add_eos=add_eos):
            for ids in arrays:
                writer.add_document(ids)
            show(report.bytes_read)
        for file, old, new in zip(source.files, stamps, _stamps(source.files), strict=True):
            if old != new:
                raise DataError(
                    f"{source.setting}: {file.path} changed while it was read; start again once it is whole"
                )
        seconds = time.perf_counter() - started
        summary = {
            "dataset": source.dataset,
            "tokenizer": tokenizer.name,
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "skipped": report.describe(),
        }
        # Written before the pair appears: whoever sees the pair finds its summary too.
        _write_whole(_summary_path(prefix), json.dumps(summary, indent=1))
    logger.info(
        "prepared %s: %d documents, %d tokens, %s in %.1f s: %s",
        source.dataset,
        writer.num_documents,
        writer.num_tokens,
        report.describe() or "nothing skipped",
        seconds,
        prefix,
    )


def _tokenized(
    source: TextSource, tokenizer: Tokenizer, report: SourceReport, *, add_bos: bool, add_eos: bool
) -> Iterator[list[np.ndarray]]:
    """Yields the documents' ids batch by batch; the next batch is read while the tokenizer works on one."""
    with ThreadPoolExecutor(1) as background:
        pending: Future[list[np.ndarray]] | None = None
        for texts in _text_batches(source.documents(report)):
            submitted = background.submit(tokenizer.encode_documents, texts, add_bos=add_bos, add_eos=add_eos)
            if pending is not None:
                yield pending.result()
            pending = submitted
        if pending is not None:
            yield pending.result()


def _text_batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _content_hashes(files: tuple[SourceFile, ...], folder: Path, name: str) -> tuple[list[str], list[_Stamp]]:
    """Returns the SHA-256 and the stamp of each file; an unchanged file's hash is remembered."""
    owner = folder / f"hashes-{name[:32]}"
    memory = owner.with_name(owner.name + ".json")
    # Also under a lock: otherwise all ranks of a node would read all the data at their first start.
    with _locked(owner, waiting_for="another start that reads the same files"):
        known = _read_memory(memory)
        now = time.time_ns()
        stamps = _stamps(files)
        stamp_of = dict(zip((str(file.path) for file in files), stamps, strict=True))
        content = {
            p: known[p][2] for p, stamp in stamp_of.items() if p in known and (*known[p][:2],) == stamp
        }
        fresh = [path for path in stamp_of if path not in content]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            content.update(zip(fresh, pool.map(_sha256, fresh), strict=True))
        remembered = {
            p: [*stamp, content[p]] for p, stamp in stamp_of.items() if now - stamp[1] > _SETTLED_NS
        }
        if remembered != known:
            _write_whole(memory, json.dumps(remembered))
    return [content[str(file.path)] for file in files], stamps


def _read_memory(path: Path) -> dict[str, list]:
    """Path -> [size, modification time, hash] as it was remembered; what is damaged is not remembered."""
    known = _read_object(path)
    return {name: entry for name, entry in known.items() if _is_memory(entry)}


def _is_memory(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and [type(each) for each in entry] == [int, int, str]


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if there is none yet, or it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamps(files: tuple[SourceFile, ...]) -> list[_Stamp]:
    with _source_errors():
        return [(s.st_size, s.st_mtime_ns) for s in (file.path.stat() for file in files)]


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with _source_errors(), open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _is_complete(prefix: Path) -> bool:
    """Whether the pair is there and whole (its .idx appears last)."""
    if not idx_path(prefix).exists():
        return False
    try:
        IndexedReader(prefix)
    except DataError as error:
        logger.warning("the prepared data is damaged and will be made again: %s", error)
        return False
    return True


def _summary_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def _log_reuse(prefix: Path) -> None:
    summary = _read_object(_summary_path(prefix))
    counts = [summary.get(name) for name in ("documents", "tokens")]
    words = [summary.get(name) for name in ("dataset", "skipped")]
    if not all(type(n) is int for n in counts) or not all(isinstance(word, str) for word in words):
        logger.info("using prepared data: %s", prefix)
        return
    logger.info(
        "using prepared %s: %d documents, %d tokens, %s: %s",
        summary["dataset"],
        summary["documents"],
        summary["tokens"],
        summary["skipped"] or "nothing skipped",
        prefix,
    )


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _remove_leftovers(folder: Path, prefix: Path) -> None:
    """Deletes what killed builds left: temporary files whose lock nobody holds (ours is held by us)."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        owner = leftover["owner"]
        if owner == prefix.name:
            path.unlink(missing_ok=True)
            continue
        with contextlib.suppress(BlockingIOError), _lock_file(folder / owner) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def _lock_file(path: Path) -> TextIO:
    return path.with_name(path.name + ".lock").open("a")


@contextlib.contextmanager
def _locked(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Holds `<path>.lock`. The system releases it when a holder dies; the file itself stays."""
    with _lock_file(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for %s (%s)", waiting_for, lock.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_folder(cache_dir: str | Path | None) -> Path:
    folder = default_cache_dir() if cache_dir is None or not str(cache_dir) else Path(cache_dir).expanduser()
    with _cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turns whatever the disk refuses into one sentence. Errors of the source are DataErrors already."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be written ({error.strerror}: {error.filename or folder}); "
            "make room or set training.cache_dir (or $TITANISH_CACHE) to a folder that can be written"
        ) from error


@contextlib.contextmanager
def _source_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


@contextlib.contextmanager
def _progress(dataset: str, total_bytes: int) -> Iterator:
    """Yields a function that shows how many bytes are done: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    columns = (TextColumn(f"tokenizing {dataset}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(dataset, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
