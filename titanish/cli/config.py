"""`titanish config check` and `titanish config show`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from titanish.config.load import load_config
from titanish.config.problem import InvalidConfig, Problem, in_order
from titanish.config.render import to_toml
from titanish.config.report import summary, verdict
from titanish.models.registry import resolve_size

_OVERRIDES = "Further arguments are overrides: --section.key=VALUE, --section.switch, --no-section.switch."


def run(words: Sequence[str]) -> int:
    """Runs `check` or `show` and returns the exit code."""
    parser = argparse.ArgumentParser(prog="titanish config", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("check", "say all that is wrong with a file, or the world and the batches that it asks for"),
        ("show", "print the resolved configuration as TOML, with the source of what is no default"),
    ):
        action = actions.add_parser(
            name, help=text, usage=f"titanish config {name} FILE [options] [overrides]",
            description=f"{text[0].upper()}{text[1:]}. {_OVERRIDES}", allow_abbrev=False,
        )  # fmt: skip
        action.add_argument("file", type=Path, metavar="FILE")
        if name == "check":
            action.add_argument("--world-size", type=_positive, metavar="N", help="number of ranks")
    arguments, overrides = parser.parse_known_args(words)
    if arguments.action == "check":
        return check(arguments.file, overrides, arguments.world_size)
    return show(arguments.file, overrides)


def check(file: Path, overrides: Sequence[str], world_size: int | None) -> int:
    """Prints every problem, or the equations of the run; 1 if there is a problem."""
    try:
        loaded = load_config(file, overrides, world_size=world_size, resolve_size=resolve_size)
    except InvalidConfig as error:
        _print(in_order([*error.problems, *error.notes]), sys.stderr)
        return 1
    _print(loaded.notes, sys.stdout)
    print(*summary(loaded), verdict(loaded, str(file)), sep="\n")
    return 0


def show(file: Path, overrides: Sequence[str]) -> int:
    """Prints the resolved configuration; what there is to note goes to the other stream, out of the TOML."""
    loaded = load_config(file, overrides, resolve_size=resolve_size)
    _print(loaded.notes, sys.stderr)
    print(to_toml(loaded.config, loaded.sources), end="")
    return 0


def _print(problems: Iterable[Problem], stream: TextIO) -> None:
    for problem in problems:
        print(problem, file=stream)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = "number of ranks"  # argparse names the type in its message
