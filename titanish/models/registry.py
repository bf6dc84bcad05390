"""Model families by name: sizes without torch, the model itself on demand.

A family is a folder with `sizes.py` (torch-free: a size dataclass `Size` and its `FLAVORS`) and `spec.py` (a
`ModelSpec`). Checking a config needs only the first, so nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanish.errors import SizeError, SizeProblem

if TYPE_CHECKING:
    from titanish.models.spec import ModelSpec

FAMILIES: dict[str, str] = {"llama3": "titanish.models.llama3"}


def family_names() -> tuple[str, ...]:
    """The model families that `model.name` may say."""
    return tuple(FAMILIES)


def flavors(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The published sizes of a family, as keyword arguments of its size class, by flavor name."""
    return _sizes_module(name).FLAVORS


def resolve_size(name: str, flavor: str, override: Mapping[str, object] | None = None) -> Any:
    """The family's size dataclass for `flavor`, with the fields in `override` replaced.

    Raises:
        SizeError: unknown name, flavor or field, a value of the wrong type, or sizes that do not fit
            together; all problems at once.
    """
    if name not in FAMILIES:
        raise SizeError([_unknown("name", name, FAMILIES)])
    module = _sizes_module(name)
    if flavor not in module.FLAVORS:
        raise SizeError([_unknown("flavor", flavor, module.FLAVORS)])
    hints = typing.get_type_hints(module.Size)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(module.Size)}
    problems, values = [], dict(module.FLAVORS[flavor])
    for key, value in (override or {}).items():
        if key not in fields:
            problems.append(_unknown(key, value, fields))
            continue
        if _fits(value, fields[key]):
            values[key] = value
        else:
            problems.append(SizeProblem(key, value, f"must be {_type_name(fields[key])}"))
    problems += module.Size.problems(values)
    if problems:
        raise SizeError(problems)
    return module.Size(**values)


def load_spec(name: str) -> ModelSpec:
    """The family's `ModelSpec`; imports torch."""
    return importlib.import_module(f"{FAMILIES[name]}.spec").SPEC


def _sizes_module(name: str) -> Any:
    return importlib.import_module(f"{FAMILIES[name]}.sizes")


def _unknown(field: str, value: object, known: Mapping[str, object]) -> SizeProblem:
    """A problem that lists what there is; for an unknown size field the field itself is the wrong word."""
    word = value if field in ("name", "flavor") else field
    folded = {name.lower(): name for name in known}
    near = [folded[match] for match in difflib.get_close_matches(str(word).lower(), folded, n=1)]
    what = {"name": "unknown model", "flavor": "unknown flavor"}.get(field, "unknown size field")
    return SizeProblem(field, value, f"{what}; known: {', '.join(known)}", near[0] if near else "")


def _fits(value: object, annotation: Any) -> bool:
    accepted = typing.get_args(annotation) or (annotation,)
    if isinstance(value, bool):  # a bool is an int to Python, but not to a reader
        return bool in accepted
    return isinstance(value, accepted) or (float in accepted and isinstance(value, int))


def _type_name(annotation: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    accepted = [a for a in (typing.get_args(annotation) or (annotation,)) if a is not type(None)]
    return " or ".join(names[a] for a in accepted)
