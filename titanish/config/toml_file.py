"""Reads a TOML file into leaf values that know their line.

The parser keeps no positions, so the file is cut into statements: a statement is the fewest lines, from where
the last one ended, that parse on their own. That needs no grammar of ours and is exact for strings and arrays
over several lines, dotted and quoted keys and inline tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanish.config.spelling import toml_key

# What the last line of a statement over several lines must hold: it closes an array or a string.
_MAY_CLOSE = ("]", '"""', "'''")
_DEEPEST = 64
_MOST_BITS = 64


@dataclass(frozen=True)
class Leaf:
    """One value of a TOML document: its dotted key and its line (0 where there is no file).

    An empty table is a leaf too, so that a section without keys is not overlooked.
    """

    key: str
    value: object
    line: int = 0


@dataclass(frozen=True)
class Document:
    """The leaves of a TOML document in its order, and the line of each table's header."""

    leaves: tuple[Leaf, ...]
    tables: Mapping[str, int]


class TomlError(Exception):
    """A file that cannot be read as TOML; `line` is 0 where no line is to blame."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_toml(path: Path) -> Document:
    """The document in the file. Raises TomlError with the line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise TomlError("no such file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TomlError("not UTF-8, which TOML must be; save the file as UTF-8", line) from None
    except OSError as error:
        raise TomlError(f"cannot be read: {error.strerror}") from None
    return parse_toml(text)


def parse_toml(text: str) -> Document:
    """The document in the text. Raises TomlError with the line."""
    text = text.replace("\r\n", "\n")
    try:
        document = loads(text)
    except tomli.TOMLDecodeError as error:
        raise _syntax_error(str(error), text) from None
    except TomlError as error:
        raise TomlError(str(error), _first_that_fails(text)) from None
    lines, tables = _lines(text)
    return Document(tuple(Leaf(key, value, lines[key]) for key, value in flatten(document)), tables)


def loads(text: str) -> dict[str, Any]:
    """What the text parses to, as tomli does it. Raises TomlError for what no configuration needs.

    Names and values nested without end would exhaust Python's stack, here or in whoever walks over them, and
    Python refuses to write integers of thousands of digits.
    """
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError:
        raise
    except RecursionError:
        raise TomlError(_TOO_DEEP) from None
    except ValueError:
        raise TomlError(_TOO_LONG) from None
    level: list[object] = [document]
    for _ in range(_DEEPEST):
        if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in level):
            raise TomlError(_TOO_LONG)
        level = [item for each in level for item in _items(each)]
    if level:
        raise TomlError(_TOO_DEEP)
    return document


_TOO_DEEP = f"nested more than {_DEEPEST} levels deep, which no key and no value needs to be"
_TOO_LONG = f"an integer of more than {_MOST_BITS} bits, which no key takes"


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) for every leaf of a nested table; names that need quotes keep them."""
    for name, value in table.items():
        key = f"{prefix}{toml_key(name)}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def _lines(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Line of every key, and line of every table header (which is a key's line where the table is empty)."""
    lines: dict[str, int] = {}
    tables: dict[str, int] = {}
    header = ""
    for first, statement, is_header in _statements(text):
        keys = [key for key, _ in flatten(statement)]
        if is_header:
            header = keys[0] + "."
            tables.setdefault(keys[0], first)
        for key in keys:
            lines.setdefault(key if is_header else header + key, first)
    return lines, tables


def _statements(text: str) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """(first line, what it parses to, is a table header) for every statement of a valid document."""
    rows = text.split("\n")
    start = 0
    while start < len(rows) and (found := _statement(rows, start)):
        end, parsed = found
        if parsed:
            yield start + 1, parsed, rows[start].lstrip().startswith("[")
        start = end


def _statement(rows: list[str], start: int) -> tuple[int, dict[str, Any]] | None:
    """Where the statement that begins at `start` ends and what it parses to; None if it never ends."""
    for end in range(start + 1, len(rows) + 1):
        may_end = end == start + 1 or any(mark in rows[end - 1] for mark in _MAY_CLOSE)
        if may_end and (parsed := _parse_or_none(rows[start:end])) is not None:
            return end, parsed
    return None


def _parse_or_none(rows: list[str]) -> dict[str, Any] | None:
    try:
        return loads("\n".join(rows))
    except tomli.TOMLDecodeError:
        return None


def _syntax_error(message: str, text: str) -> TomlError:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if not found:
        return TomlError(f"not valid TOML: {message}")
    message = message[: found.start()]
    if found[1]:
        return TomlError(f"not valid TOML: {message}", int(found[1]))
    # Where the parser gives up says little about a bracket or a quote that was never closed.
    return TomlError(f"not valid TOML: {message}; what begins here never ends", _first_that_fails(text))


def _first_that_fails(text: str) -> int:
    """The line of the first statement that cannot be read on its own, 0 if each of them can."""
    rows, start = text.split("\n"), 0
    try:
        while start < len(rows) and (statement := _statement(rows, start)):
            start = statement[0]
    except TomlError:
        pass
    return start + 1 if start < len(rows) else 0
