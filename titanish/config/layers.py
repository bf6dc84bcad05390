"""Lays files and flags over the defaults, key by key: later wins, and every value remembers its source."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanish.config.flags import Flag
from titanish.config.keys import (
    BASE,
    is_override,
    known_keys,
    known_sections,
    unknown_key,
    unknown_section,
)
from titanish.config.problem import Problem, Source
from titanish.config.spelling import shown, split_key
from titanish.config.status import REMOVED, RENAMED
from titanish.config.toml_file import Document, Leaf, TomlError, read_toml
from titanish.config.values import mistyped, violation


@dataclass
class Layers:
    """Known keys with their last value and its source, not yet checked; and what was wrong on the way.

    `doubtful` are keys whose value may not be what the user meant, because something near them is wrong;
    `unread` says that a file could not be read, so that any key may be; `misplaced` that something stands
    outside all sections, so that what seems not to be set may be set there.
    """

    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    unread: bool = False
    misplaced: bool = False
    _files: int = 0

    def add_file(self, path: Path) -> None:
        """Lays the file, and below it the files it names as its base, over what is there."""
        self._add_file(path, chain=(), place=Source("file", str(path)))

    def add_flags(self, flags: Sequence[Flag]) -> None:
        """Lays values of the command line over what is there."""
        for flag in flags:
            self._add(Leaf(flag.key, flag.value), flag.source)

    def _add_file(self, path: Path, chain: tuple[Path, ...], place: Source) -> None:
        real = path.resolve()
        if real in chain:
            self.unread = True
            circle = " -> ".join(each.name for each in (*chain[chain.index(real) :], real))
            self._report(
                place, BASE, str(path), f"base = {shown(str(path))}: the files name each other: {circle}"
            )
            return
        try:
            document = read_toml(path)
        except TomlError as error:
            self.unread = True
            named_by_base = bool(chain) and not error.line
            where = place if named_by_base else Source("file", str(path), error.line, order=place.order)
            self._report(where, BASE, str(path), f"{path}: {error}" if named_by_base else str(error))
            return
        # A base is applied before the file that names it, but is told about after it.
        self._files += 1
        order = self._files
        for base, line in self._bases(document, path, order):
            self._add_file(base, (*chain, real), Source("file", str(path), line, order=order))
        self._add_document(document, path, order)

    def _bases(self, document: Document, path: Path, order: int) -> Iterator[tuple[Path, int]]:
        for leaf in document.leaves:
            if leaf.key != BASE:
                continue
            if rule := violation(tuple[str, ...], leaf.value):
                self.unread = True
                where = Source("file", str(path), leaf.line, order=order)
                self._report(where, BASE, leaf.value, mistyped(BASE, leaf.value, rule))
            elif isinstance(leaf.value, list):
                yield from ((Path(os.path.normpath(path.parent / name)), leaf.line) for name in leaf.value)

    def _add_document(self, document: Document, path: Path, order: int) -> None:
        leaves = [leaf for leaf in document.leaves if leaf.key != BASE]
        for section, group in itertools.groupby(leaves, key=_unknown_section_of):
            members = list(group)
            if section:
                line = document.tables.get(section, members[0].line)
                self._add_unknown_section(section, members, Source("file", str(path), line, order=order))
                continue
            for leaf in members:
                self._add(leaf, Source("file", str(path), leaf.line, order=order))

    def _add_unknown_section(self, section: str, leaves: Sequence[Leaf], where: Source) -> None:
        """One mistake, whatever the number of keys in the table."""
        self.misplaced = True
        names = tuple(leaf.key[len(section) + 1 :] for leaf in leaves if leaf.key != section)
        message, meant = unknown_section(section, names)
        self.doubtful.update(meant)
        self._report(where, section, None, message)

    def _add(self, leaf: Leaf, where: Source) -> None:
        key, value = leaf.key, leaf.value
        if key in known_sections():
            if value != {}:  # an empty table says nothing, and is fine
                self.doubtful.add(key)
                self._report(
                    where, key, value, f"{key} = {shown(value)}: '{key}' is a section; write [{key}]"
                )
        elif key in known_keys() or is_override(key):
            self.values[key] = value
            self.sources[key] = where
        else:
            message, meant = unknown_key(key, value)
            self.unread |= BASE in meant  # nor was the file that it names
            self.misplaced |= split_key(key)[0] not in known_sections()
            self.doubtful.update(meant)
            self._report(where, key, value, message)

    def _report(self, where: Source, key: str, value: object, message: str) -> None:
        self.problems.append(Problem("error", where, key, value, message))


def _unknown_section_of(leaf: Leaf) -> str:
    """The unknown table that the leaf stands in (or is), "" if its table is known."""
    section = split_key(leaf.key)[0]
    if leaf.value == {} and leaf.key not in known_sections() | known_keys():
        section = leaf.key
    known = known_sections() | known_keys() | {""}
    return "" if section in known or leaf.key in RENAMED or leaf.key in REMOVED else section
