"""The command line as configuration: `--section.key=VALUE`, where VALUE is written as in TOML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tomli

from titanish.config.keys import is_switch, takes_text, value_type
from titanish.config.problem import Problem, Source
from titanish.config.toml_file import flatten


@dataclass(frozen=True)
class Flag:
    """One value from the command line; `written` is the flag as the user wrote it."""

    key: str
    value: object
    written: str


def parse_flags(words: Sequence[str]) -> tuple[tuple[Flag, ...], tuple[Problem, ...]]:
    """The values on the command line in their order, and the words that are none."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    rest = _Words(words)
    for word in rest:
        found = _flag(word, rest)
        if isinstance(found, Flag):
            flags += _leaves(found)
        else:
            problems.append(found)
    return tuple(flags), tuple(problems)


class _Words(Iterator[str]):
    """The words of a command line, with a look at the next one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    def __next__(self) -> str:
        if not self._words:
            raise StopIteration
        return self._words.pop(0)

    @property
    def ahead(self) -> str | None:
        return self._words[0] if self._words else None


def _flag(word: str, rest: _Words) -> Flag | Problem:
    name, equals, text = word.partition("=")
    if not word.startswith("--") or len(name) == 2:
        return _problem(word, "", "neither a flag nor the value of one; write --section.key=VALUE")
    key = name[2:]
    if key.startswith("no-"):
        return _off(key[3:], name, equals)
    annotation = value_type(key)
    if equals:
        return Flag(key, _value(text, annotation), name)
    if annotation is not None and is_switch(annotation):
        return Flag(key, next(rest) == "true" if rest.ahead in ("true", "false") else True, name)
    if rest.ahead is None or rest.ahead.startswith("--"):
        if annotation is None:  # an unknown key is the mistake, not its value
            return Flag(key, True, name)
        return _problem(name, key, f"{key} needs a value; write {name}=VALUE")
    return Flag(key, _value(next(rest), annotation), name)


def _off(key: str, name: str, equals: str) -> Flag | Problem:
    annotation = value_type(key)
    if annotation is not None and not is_switch(annotation):
        return _problem(
            name, key, f"{key} is not true or false, so it cannot be switched off; write --{key}=VALUE"
        )
    if equals:
        return _problem(name, key, f"a switch takes no value; write {name} or --{key}=false")
    return Flag(key, False, name)


def _value(text: str, annotation: object) -> object:
    """The TOML value that the text is; a string where it is none, or where the key takes only strings."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:  # a line break, and then something else
        return text
    value: object = parsed["value"]
    # selective_ac_option=2 can only mean the string "2": on a command line quotes are the shell's.
    text_only = annotation is not None and takes_text(annotation)
    return text if text_only and not isinstance(value, str) else value


def _leaves(flag: Flag) -> Iterator[Flag]:
    """An inline table sets each of its keys, as it would in a file."""
    if not isinstance(flag.value, dict) or not flag.value:
        yield flag
        return
    for key, value in flatten(flag.value, f"{flag.key}."):
        yield Flag(key, value, flag.written)


def _problem(written: str, key: str, message: str) -> Problem:
    return Problem("error", Source("flag", flag=written), key, None, message)
