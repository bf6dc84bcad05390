"""Every key there is, and the nearest one to a key that there is not."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from titanish.config.schema import Config, Scalar
from titanish.config.spelling import shown, split_key
from titanish.config.status import REMOVED, RENAMED, STATUS

BASE = "base"
"""The one top-level key, which only a file has: files to lay below this one."""

OVERRIDE = "model.override"
"""The one table whose keys are not ours: they are the model family's size fields."""


@cache
def field_types() -> Mapping[str, Any]:
    """Dotted key -> annotation of every implemented key."""
    return dict(_fields(Config, ""))


@cache
def field_defaults() -> Mapping[str, object]:
    """Dotted key -> default of every implemented key."""
    return flat_values(Config())


def flat_values(config: Config) -> dict[str, object]:
    """Dotted key -> value of every implemented key, in the order of the sections."""
    return {key: value_at(config, key) for key in field_types()}


def value_at(config: Config, key: str) -> Any:
    """The value of one implemented key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@cache
def known_keys() -> frozenset[str]:
    """Every key that a file may hold: implemented ones, and known ones without effect."""
    return frozenset(field_types()) | frozenset(STATUS)


@cache
def known_sections() -> frozenset[str]:
    """Every table that a file may hold."""
    parts = [key.split(".") for key in known_keys()]
    return frozenset(".".join(part[:end]) for part in parts for end in range(1, len(part))) | {OVERRIDE}


def is_override(key: str) -> bool:
    """Whether the key is a size field of the model."""
    return split_key(key)[0] == OVERRIDE


def value_type(key: str) -> Any:
    """The annotation of a known key or a size field, None for any other."""
    if is_override(key):
        return Scalar
    return STATUS[key].type if key in STATUS else field_types().get(key)


def takes_text(annotation: Any) -> bool:
    """Whether every value of this type is a string (or absent)."""
    return all(kind is str for kind in _kinds(annotation))


def is_switch(annotation: Any) -> bool:
    """Whether the type is true or false."""
    return all(kind is bool for kind in _kinds(annotation))


def unknown_key(key: str, value: object) -> tuple[str, tuple[str, ...]]:
    """The sentence about a key that does not exist, and the keys that may be meant."""
    what = f"unknown key '{key}' ({shown(value)})"
    if key in RENAMED:
        return f"{what}; write {RENAMED[key]} instead", (RENAMED[key].split()[0],)
    if key in REMOVED:
        return f"{what}; delete it: {REMOVED[key]}", ()
    if key == BASE:
        return f"{what}; only a file has a base: write {BASE} = {shown([value])} at its top", ()
    section, name = split_key(key)
    if not section and difflib.get_close_matches(name.lower(), [BASE], cutoff=0.7):
        return f"{what}; did you mean '{BASE}'?", (BASE,)
    if section in known_keys():
        return f"{what}; '{section}' is a value, not a section", (section,)
    elsewhere = _same_name(section, name)
    if elsewhere and section in known_sections():
        right = " or ".join(f"[{split_key(other)[0]}]" for other in elsewhere)
        return f"{what}; '{name}' belongs in {right}: write {_alternatives(elsewhere)}", elsewhere
    near = _nearest(section, name) or elsewhere
    if near:
        return f"{what}; did you mean {_alternatives(near)}?", near
    if section in known_sections():
        return f"{what}; [{section}] has {_names_in(section)}", ()
    return f"{what}; the sections are {_top_sections()}", ()


def unknown_section(section: str, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The sentence about a table that does not exist, and the keys of the one that may be meant."""
    what = f"unknown section [{section}]" + (f" ({', '.join(names)})" if names else "")
    if near := _nearest_section(section):
        return f"{what}; did you mean [{near}]?", tuple(f"{near}.{name}" for name in names)
    homes = [(name, match) for name in names if (match := _same_name(section, name))]
    if homes:
        name, found = homes[0]
        return f"{what}; '{name}' is {_alternatives(found)}", tuple(
            key for _, match in homes for key in match
        )
    return f"{what}; the sections are {_top_sections()}", ()


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, annotation in typing.get_type_hints(section, include_extras=True).items():
        if name not in section.model_fields:
            continue
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types that an annotation is made of, None left out."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (type(choice) for choice in get_args(annotation))
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(annotation.__origin__)
    elif annotation is not NoneType:
        yield origin or annotation


def _nearest(section: str, name: str) -> tuple[str, ...]:
    """The key that is spelled most like this one: in its own section first, then anywhere."""
    own = section if section in known_sections() else _nearest_section(section)
    here = {split_key(key)[1]: key for key in known_keys() if split_key(key)[0] == own}
    if found := difflib.get_close_matches(name, here, n=1, cutoff=0.6):
        return (here[found[0]],)
    key = f"{section}.{name}" if section else name
    return tuple(difflib.get_close_matches(key, sorted(known_keys()), n=1, cutoff=0.75))


def _nearest_section(section: str) -> str:
    found = difflib.get_close_matches(section, sorted(known_sections()), n=1, cutoff=0.7)
    return found[0] if found else ""


def _same_name(section: str, name: str) -> tuple[str, ...]:
    """Keys of this name in other sections, unless there are so many that the name says nothing."""
    found = sorted(key for key in known_keys() if split_key(key)[1] == name)
    return tuple(found) if len(found) <= 2 else ()


def _top_sections() -> str:
    return ", ".join(sorted(section for section in known_sections() if "." not in section))


def _names_in(section: str) -> str:
    return ", ".join(sorted(split_key(key)[1] for key in known_keys() if split_key(key)[0] == section))


def _alternatives(keys: tuple[str, ...]) -> str:
    return " or ".join(f"'{key}'" for key in keys)
