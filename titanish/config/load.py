"""From a file and flags to a checked configuration, or to one error that lists everything wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanish.config.degrees import BatchPlan, Degrees
from titanish.config.flags import Flag, parse_flags
from titanish.config.keys import field_types, value_type
from titanish.config.layers import Layers
from titanish.config.problem import DEFAULT, InvalidConfig, Problem, Source, in_order
from titanish.config.rules.all import apply_rules
from titanish.config.rules.base import Facts, any_doubt
from titanish.config.rules.plans import (
    BATCHES,
    MESH,
    SIZES,
    ResolveSize,
    plan_batch,
    plan_size,
    plan_world,
)
from titanish.config.schema import Config
from titanish.config.spelling import plain_name, shown, split_key
from titanish.config.status import STATUS
from titanish.config.values import as_json, mistyped, violation

_FILE_FLAG = "job.config_file"


@dataclass(frozen=True)
class Loaded:
    """A valid configuration and all that was learned on the way.

    `sources` has every key; `size` is None without `resolve_size`; `notes` are to be shown at a check and a
    start, and hold what would fail a start if this was only a check. `world_assumed` says that no world size
    was given, and `world` is the smallest one that fits.
    """

    config: Config
    sources: Mapping[str, Source]
    notes: tuple[Problem, ...]
    size: Any
    world: Degrees | None
    batch: BatchPlan | None
    world_assumed: bool = False


def load_config(
    file: Path | None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    resolve_size: ResolveSize | None = None,
    at_start: bool = False,
    device_type: str | None = None,
) -> Loaded:
    """The configuration of `file` (or of the one that `--job.config_file` names) under the overrides.

    Args:
        overrides: words of a command line, e.g. `["--training.steps=10", "--compile.enable"]`.
        world_size: number of ranks; None takes the smallest that fits the degrees.
        resolve_size: gives the model's size, so that rules about it can run.
        at_start: what only fails a start (missing paths, keys that would change results but have no effect)
            fails now.
        device_type: "cpu" or "cuda", for what depends on it; None if unknown.

    Raises:
        InvalidConfig: a ConfigError whose text has a line for every problem; its `problems` holds them.
    """
    flags, problems = parse_flags(overrides)
    # A word that is no flag may be the file, or the value of a flag, that the user thinks was given.
    layers = Layers(problems=list(problems), misplaced=any(not problem.key for problem in problems))
    file = _file_to_load(file, flags, layers)
    if file is not None:
        layers.add_file(file)
    layers.add_flags(flags)
    config = _validated(layers)
    found = _Findings(layers, config, Source("file", str(file)) if file else DEFAULT, device_type)
    if not layers.unread:
        found.find(resolve_size, world_size)
    failing = [p for p in layers.problems if p.level == "error" or (at_start and p.level == "start")]
    notes = [p for p in layers.problems if p not in failing]
    if failing:
        raise InvalidConfig(failing, notes)
    sources = {key: layers.sources.get(key, DEFAULT) for key in [*field_types(), *layers.sources]}
    return Loaded(
        config,
        sources,
        in_order(notes),
        found.size,
        found.world,
        found.batch,
        world_assumed=world_size is None,
    )


def _file_to_load(file: Path | None, flags: Sequence[Flag], layers: Layers) -> Path | None:
    named = [flag for flag in flags if flag.key == _FILE_FLAG and isinstance(flag.value, str)]
    if not named:
        return file
    last = named[-1]
    path = Path(str(last.value))
    if file is not None and file != path:
        message = f"{_FILE_FLAG} = {shown(last.value)}: '{file}' is the file already; name one file"
        layers.problems.append(Problem("error", last.source, _FILE_FLAG, last.value, message))
        return file
    return path


def _validated(layers: Layers) -> Config:
    """The configuration of all valid values; what is wrong with the others is reported in `layers`."""
    valid: dict[str, Any] = {}
    for key, value in layers.values.items():
        if rule := violation(value_type(key), value):
            layers.doubtful.add(key)
            layers.problems.append(
                Problem("error", layers.sources[key], key, value, mistyped(key, value, rule))
            )
        elif key in STATUS:
            if not _is_default(key, value):
                if key in MESH:
                    layers.doubtful.add(key)
                message = f"{key} = {shown(value)}: {STATUS[key].sentence}"
                layers.problems.append(Problem(STATUS[key].level, layers.sources[key], key, value, message))
        else:
            _put(valid, key, value)
    return Config.model_validate_json(as_json(valid), strict=True)


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    table, name = split_key(key)
    for section in table.split("."):
        tree = tree.setdefault(section, {})
    tree[plain_name(name)] = value


def _is_default(key: str, value: object) -> bool:
    return (tuple(value) if isinstance(value, list) else value) == STATUS[key].default


class _Findings:
    """The steps after the values: each needs what the ones before it found, and adds problems to `layers`."""

    def __init__(self, layers: Layers, config: Config, fallback: Source, device_type: str | None) -> None:
        self._layers = layers
        self._facts = Facts(
            config,
            layers.sources,
            device_type=device_type,
            fallback=fallback,
            complete=not layers.misplaced,
        )
        self.size: Any = None
        self.world: Degrees | None = None
        self.batch: BatchPlan | None = None

    def find(self, resolve_size: ResolveSize | None, world_size: int | None) -> None:
        """Size, world and batch, then the rules; a step whose keys are in doubt is left out."""
        problems, doubtful = self._layers.problems, self._layers.doubtful
        if resolve_size is not None and not any_doubt(SIZES, doubtful):
            size = plan_size(self._facts, resolve_size)
            if isinstance(size, list):
                problems += size
            else:
                self.size = size
        if not any_doubt(MESH, doubtful):
            world = plan_world(self._facts, world_size)
            if isinstance(world, Problem):
                problems.append(world)
            else:
                self.world = world
        if self.world and not any_doubt(BATCHES, doubtful):
            batch = plan_batch(self._facts, self.world)
            if isinstance(batch, Problem):
                problems.append(batch)
            else:
                self.batch = batch
        problems += apply_rules(replace(self._facts, size=self.size), doubtful)
