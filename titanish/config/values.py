"""Checks one value against the type of its key, and says in a sentence what the type wants."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from functools import cache
from typing import Any

import tomli
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from titanish.config.spelling import shown, toml_value

_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}

_RANGES = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def violation(annotation: Any, value: object) -> str:
    """What is wrong with the value, with the right spelling if it is plain; "" if nothing is."""
    if _has_nul(value):  # no path, name or text can hold one, and the system cuts a string there
        return "must not contain a NUL character"
    try:
        _adapter(annotation).validate_json(as_json(value))
    except ValidationError as error:
        details = error.errors()
        return _rule(details) + _spelling(details[0], value)
    return ""


def _has_nul(value: object) -> bool:
    if isinstance(value, list):
        return any(_has_nul(each) for each in value)
    return isinstance(value, str) and "\0" in value


def as_json(value: object) -> str:
    """The TOML value as JSON, in which pydantic's strict mode takes a list for a tuple.

    A date becomes something that no key takes, since no key takes dates.
    """
    return json.dumps(value, default=lambda date: {type(date).__name__: str(date)})


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def _rule(details: list[ErrorDetails]) -> str:
    """One sentence for all members of a union that the value is not."""
    item = next((part for part in details[0]["loc"] if isinstance(part, int)), None)
    subject = "" if item is None else f"item {item + 1} "
    kinds = {d["type"] for d in details}
    if "finite_number" in kinds:  # says more than what else a union takes
        return f"{subject}must be a finite number"
    if kinds <= _RANGES and math.isnan(details[0]["input"]):
        return f"{subject}must be a number"
    wanted = [_WANTED.get(d["type"], "").format(**_plain(d.get("ctx", {}))) for d in details]
    if not all(wanted):  # a rule of ours, which is a sentence already
        return subject + details[0]["msg"]
    return f"{subject}must be {' or '.join(dict.fromkeys(wanted))}"


def _plain(bounds: dict[str, Any]) -> dict[str, Any]:
    """Bounds as a message writes them: every digit of an integer, and 1 instead of 1.0."""
    return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in bounds.items()}


def _spelling(detail: ErrorDetails, value: object) -> str:
    kind, given = detail["type"], detail["input"]
    if kind == "literal_error" and isinstance(given, str):
        choices = re.findall(r"'([^']+)'", detail["ctx"]["expected"])
        near = difflib.get_close_matches(given.lower(), [choice.lower() for choice in choices], n=1)
        return next((f"; did you mean '{c}'?" for c in choices if near and c.lower() == near[0]), "")
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f"; write {int(given)}"
    if kind in ("int_type", "float_type") and isinstance(given, str) and _is_number(given):
        return f"; write {given} without quotes"
    if kind == "bool_type" and str(given).lower() in ("true", "false"):
        return f"; write {str(given).lower()}" + (" without quotes" if given in ("true", "false") else "")
    if kind == "string_type" and isinstance(given, int | float) and not isinstance(given, bool):
        return f'; write "{given}" in quotes'
    if kind == "string_type" and isinstance(value, datetime.date | datetime.time):
        return "; dates need quotes"
    if kind == "tuple_type" and isinstance(value, str):
        return f"; write {toml_value([part.strip() for part in value.split(',')])}"
    return ""


def _is_number(text: str) -> bool:
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return False
    number = parsed.get("value")
    return len(parsed) == 1 and isinstance(number, int | float) and not isinstance(number, bool)


def mistyped(key: str, value: object, rule: str) -> str:
    """The sentence about a known key with a wrong value."""
    return f"{key} = {shown(value)}: {rule}"
