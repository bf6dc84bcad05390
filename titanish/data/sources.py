"""Where documents come from: text files, the standard library's own source, and what was wrong with them.

A text source lists its files (for the cache's content address) and yields documents one by one. What it
cannot use is counted in a `SourceReport` with the place of the first of each kind: nothing ends the run on
one bad line, and nothing is lost without a word.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from titanish.data.indexed import bin_path, idx_path
from titanish.errors import DataError

TEXT_ENDINGS = (".jsonl", ".txt")
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_STDLIB_HELD_OUT = 0.02
_BLANK = "blank lines"
_MISSING = "records without the text field"
_BOM = b"\xef\xbb\xbf"


@dataclass
class SourceReport:
    """What reading a source met. Places are `file:line`, or `file` for a document that is a whole file."""

    documents: int = 0
    bytes_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Kind of problem -> number of documents left out for it."""
    mended: Counter[str] = field(default_factory=Counter)
    """Kind of oddity -> number of files in which it was removed."""
    first: dict[str, str] = field(default_factory=dict)
    """Kind -> place of the first one."""
    fields: Counter[str] = field(default_factory=Counter)
    """Field names of the JSON records that lack the text field."""

    def skip(self, kind: str, place: str) -> None:
        """Counts a document that is left out."""
        self.skipped[kind] += 1
        self.first.setdefault(kind, place)

    def mend(self, kind: str, place: str) -> None:
        """Counts a file that is read although something had to be removed."""
        self.mended[kind] += 1
        self.first.setdefault(kind, place)

    def describe(self) -> str:
        """Returns what was skipped and mended in one line, "" if nothing was."""
        parts = []
        for verb, counts in (("skipped", self.skipped), ("removed", self.mended)):
            if counts:
                listed = (f"{n} {kind} (first: {self.first[kind]})" for kind, n in sorted(counts.items()))
                parts.append(f"{verb} " + ", ".join(listed))
        return "; ".join(parts)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source; `name` is its path relative to the source's root, with forward slashes."""

    name: str
    path: Path
    """Absolute."""


@dataclass(frozen=True)
class TextSource:
    """Documents from `files`: one per line of a `.jsonl`, one per file otherwise.

    `setting` is what a user wrote to get it ("training.dataset_path = 'x'"), for messages; `root` is the
    folder that file names are relative to.
    """

    dataset: str
    setting: str
    root: Path
    files: tuple[SourceFile, ...]
    text_field: str = "text"

    def documents(self, report: SourceReport) -> Iterator[str]:
        """Yields the documents in order, counting in `report`. DataError if not a single one can be used."""
        for file in self.files:
            try:
                with file.path.open("rb") as stream:
                    read = self._lines if file.name.lower().endswith(".jsonl") else self._whole
                    yield from read(stream, file, report)
            except OSError as error:
                raise DataError(f"{self.setting}: cannot read {file.path}: {error.strerror}") from error
        if report.documents == 0:
            raise DataError(self._nothing_usable(report))

    def _lines(self, stream: BinaryIO, file: SourceFile, report: SourceReport) -> Iterator[str]:
        crlf = False
        for number, line in enumerate(stream, 1):
            report.bytes_read += len(line)
            place = f"{file.path}:{number}"
            if number == 1 and line.startswith(_BOM):
                line = line[len(_BOM) :]
                report.mend("byte order marks", str(file.path))
            if line.endswith(b"\r\n") and not crlf:
                crlf = True
                report.mend("CRLF line ends", str(file.path))
            if not line.strip():
                report.skip(_BLANK, place)
                continue
            try:
                text = self._record_text(line, report)
            except _Unusable as problem:
                report.skip(problem.kind, place)
                continue
            report.documents += 1
            yield text

    def _record_text(self, line: bytes, report: SourceReport) -> str:
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError:
            raise _Unusable("lines of invalid UTF-8") from None
        except (ValueError, RecursionError):
            raise _Unusable("lines of broken JSON") from None
        if not isinstance(record, dict):
            raise _Unusable("lines that are no JSON object")
        if self.text_field not in record:
            report.fields.update(record.keys())
            raise _Unusable(_MISSING)
        text = record[self.text_field]
        if text is None:
            raise _Unusable("records with a null text field")
        if not isinstance(text, str):
            raise _Unusable("records whose text field is no string")
        return _checked(text)

    def _whole(self, stream: BinaryIO, file: SourceFile, report: SourceReport) -> Iterator[str]:
        data = stream.read()
        report.bytes_read += len(data)
        place = str(file.path)
        if data.startswith(_BOM):
            data = data[len(_BOM) :]
            report.mend("byte order marks", place)
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
            report.mend("CRLF line ends", place)
        try:
            text = _checked(data.decode())
        except UnicodeDecodeError:
            report.skip("files of invalid UTF-8", place)
        except _Unusable as problem:
            report.skip(problem.kind, place)
        else:
            report.documents += 1
            yield text

    def _nothing_usable(self, report: SourceReport) -> str:
        missing = report.skipped[_MISSING]
        if missing and missing == sum(report.skipped.values()) - report.skipped[_BLANK]:
            found = ", ".join(f"{name!r} ({n})" for name, n in report.fields.most_common(8)) or "none"
            return (
                f"{self.setting}: none of the {missing} records has the field training.text_field = "
                f"{self.text_field!r}; fields found: {found}; "
                "set training.text_field to the one that holds the text"
            )
        reason = report.describe() or "the files are empty"
        return f"{self.setting}: not one usable document in {len(self.files)} files: {reason}"


class _Unusable(Exception):
    """Why one document is left out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _checked(text: str) -> str:
    if not text.strip():
        raise _Unusable("empty documents")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair ("\\ud800"), which is no character and has no UTF-8.
        raise _Unusable("documents with half a surrogate pair") from None
    return text


def python_stdlib(*, held_out: bool, root: Path | None = None) -> TextSource:
    """Returns the `.py` files of the running Python's standard library, without tests and installed packages.

    About 2% of the files, chosen by a hash of their names, are `held_out` for validation; the others are for
    training. `root` replaces the library's folder in tests.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED]
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    files = tuple(file for file in _named(paths, root) if _is_held_out(file.name) == held_out)
    setting = f"dataset = 'python_stdlib' ({'held-out' if held_out else 'training'} files)"
    if not files:
        raise DataError(
            f"{setting}: no .py files in {root}; this Python comes without its sources, use another dataset"
        )
    return TextSource("python_stdlib", setting, root, files)


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < _STDLIB_HELD_OUT * 2**32


def text_files(path: str | Path, *, setting: str, text_field: str) -> TextSource:
    """Returns the documents of a `.jsonl` or `.txt` file, of all such files below a folder, or of a glob.

    `setting` is the key that `path` came from. Files are read in the order of their relative names.
    """
    setting = f"{setting} = {str(path)!r}"
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        files, others = _below(target)
        if not files:
            holds = f"it holds {', '.join(sorted(others)[:8])}" if others else "it is empty"
            raise DataError(f"{setting}: no text files in this folder ({holds}); {_ENDINGS_RULE}")
        return TextSource("text", setting, target, _named(files, target), text_field)
    if target.is_file():
        files = [target]
    elif glob.has_magic(str(target)):
        files = _matching(target)
        if not files:
            raise DataError(f"{setting}: no file matches this pattern (searched for {target})")
    else:
        raise DataError(f"{setting}: no such file or folder ({target})")
    for file in files:
        if file.suffix.lower() not in TEXT_ENDINGS:
            raise DataError(f"{setting}: {file} is no text file; {_ENDINGS_RULE}")
    root = Path(os.path.commonpath([file.parent for file in files]))
    return TextSource("text", setting, root, _named(files, root), text_field)


_ENDINGS_RULE = "text files end in .jsonl (one document a line) or .txt (one document a file)"


def _matching(pattern: Path) -> list[Path]:
    """The files that a glob names and the text files below the folders that it names, each once."""
    matches = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    below = (file for folder in matches if folder.is_dir() for file in _below(folder)[0])
    return list(dict.fromkeys([*(match for match in matches if match.is_file()), *below]))


def _below(folder: Path) -> tuple[list[Path], set[str]]:
    """All text files below a folder, and the endings of what else is there.

    Hidden files and folders (`.git`, `.ipynb_checkpoints`) are passed over.
    """
    found, others, visited = [], set(), set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        # A link to a folder is followed, since data is often gathered by links, but not round in circles.
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if ending in TEXT_ENDINGS and not name.startswith("."):
                found.append(Path(parent, name))
            else:
                others.add(ending or name)
    return found, others


def _named(paths: list[Path], root: Path) -> tuple[SourceFile, ...]:
    return tuple(sorted((SourceFile(p.relative_to(root).as_posix(), p) for p in paths), key=lambda f: f.name))


def megatron_prefix(path: str | Path, *, setting: str) -> Path:
    """Returns the prefix of a `.bin`/`.idx` pair named by its prefix or by either file.

    DataError that names what is missing if the two are not both there.
    """
    given = Path(path).expanduser()
    prefix = given.with_name(given.name[:-4]) if given.suffix in (".bin", ".idx") else given
    missing = [file for file in (bin_path(prefix), idx_path(prefix)) if not file.is_file()]
    if missing:
        names = " and ".join(str(file) for file in missing)
        raise DataError(
            f"{setting} = {str(path)!r}: no file {names}; token data is a pair of files, give their common "
            "path without the .bin or .idx ending"
        )
    return prefix
