"""The command line as configuration: `--section.key=VALUE`, where VALUE is written as in TOML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tomli

from titanish.config.keys import is_switch, takes_text, value_type
from titanish.config.problem import Problem, Source
from titanish.config.spelling import shown
from titanish.config.toml_file import TomlError, flatten, loads

_MOST_PARTS = 64
_LONGEST_NAME = 60
_HELP = "'titanish config show FILE' lists every key with its value; override one with --section.key=VALUE"


@dataclass(frozen=True)
class Flag:
    """One value from the command line; `source` holds the flag as the user wrote it."""

    key: str
    value: object
    source: Source


def parse_flags(words: Sequence[str]) -> tuple[tuple[Flag, ...], tuple[Problem, ...]]:
    """The values on the command line in their order, and the words that are none."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        found = _next(rest, order=len(words) - len(rest))
        if isinstance(found, Flag):
            flags += _leaves(found)
        else:
            problems.append(found)
    return tuple(flags), tuple(problems)


def _next(rest: list[str], order: int) -> Flag | Problem:
    """Takes one flag with its value off the front of the words."""
    word = rest.pop(0)
    name, equals, text = word.partition("=")
    source = Source("flag", flag=name, order=order)
    if not word.startswith("--") or len(name) == 2:
        source = Source("flag", flag=word, order=order)
        return _problem(source, "", _stray(word))
    key = name[2:]
    if key.count(".") >= _MOST_PARTS:
        shortened = Source("flag", flag=f"{name[:_LONGEST_NAME]}...", order=order)
        return _problem(shortened, "", f"a key of more than {_MOST_PARTS} parts; write --section.key=VALUE")
    if name == "--help":
        return _problem(source, "", _HELP)
    if key.startswith("no-"):
        return _off(key[3:], source, equals)
    annotation = value_type(key)
    if equals:
        return _read(key, text, annotation, source)
    if annotation is not None and is_switch(annotation):
        written_out = bool(rest) and rest[0] in ("true", "false")
        return Flag(key, rest.pop(0) == "true" if written_out else True, source)
    if rest and not rest[0].startswith("--"):
        return _read(key, rest.pop(0), annotation, source)
    if annotation is None:  # an unknown key is the mistake, not its value
        return Flag(key, True, source)
    return _problem(source, key, f"{key} needs a value; write {name}=VALUE")


def _stray(word: str) -> str:
    if word == "-h":
        return _HELP
    cure = f"--job.config_file {word}" if word.endswith(".toml") else "--section.key=VALUE"
    return f"neither a flag nor the value of one; write {cure}"


def _read(key: str, text: str, annotation: object, source: Source) -> Flag | Problem:
    try:
        return Flag(key, _value(text, annotation), source)
    except TomlError as error:
        return _problem(source, key, f"{key} = {shown(text)}: {error}")


def _off(key: str, source: Source, equals: str) -> Flag | Problem:
    annotation = value_type(key)
    if annotation is not None and not is_switch(annotation):
        message = f"{key} is not true or false, so it cannot be switched off; write --{key}=VALUE"
        return _problem(source, key, message)
    if equals:
        return _problem(source, key, f"a switch takes no value; write {source.flag} or --{key}=false")
    return Flag(key, False, source)


def _value(text: str, annotation: object) -> object:
    """The TOML value that the text is; a string where it is none, or where the key takes only strings."""
    try:
        parsed = loads(f"value = {text}")
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
        yield Flag(key, value, flag.source)


def _problem(source: Source, key: str, message: str) -> Problem:
    return Problem("error", source, key, None, message)
