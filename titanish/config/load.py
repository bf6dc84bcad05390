"""From a file and flags to a checked configuration, or to one error that lists everything wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanish.config.degrees import BatchPlan, Degrees
from titanish.config.flags import Flag, parse_flags
from titanish.config.keys import OVERRIDE, field_types, is_override, value_type
from titanish.config.layers import Layers
from titanish.config.problem import DEFAULT, InvalidConfig, Problem, Source, in_order, shown
from titanish.config.rules.all import apply_rules
from titanish.config.rules.base import Facts, any_doubt
from titanish.config.rules.equations import BATCHES, DEGREES, plan_batch, plan_world
from titanish.config.schema import Config
from titanish.config.status import STATUS
from titanish.config.values import as_json, mistyped, violation
from titanish.errors import SizeError

ResolveSize = Callable[[str, str, Mapping[str, object]], Any]
"""(model.name, model.flavor, model.override) -> size; raises errors.SizeError."""

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
    layers = Layers(problems=list(problems))
    file = _file_to_load(file, flags, layers)
    if file is not None:
        layers.add_file(file)
    layers.add_flags(flags)
    config = _validated(layers)
    found = _Findings(layers, config, fallback=Source("file", str(file)) if file else DEFAULT)
    if not layers.unread:
        found.resolve_size(resolve_size)
        found.plan(world_size)
        found.apply_rules(device_type)
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
        message = f"{last.written} = {shown(last.value)}: the file to load is '{file}' already; name one file"
        layers.problems.append(
            Problem("error", Source("flag", flag=last.written), _FILE_FLAG, last.value, message)
        )
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
            layers.problems += _status(key, value, layers.sources[key])
        else:
            _put(valid, key, value)
    return Config.model_validate_json(as_json(valid), strict=True)


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    prefix = OVERRIDE if is_override(key) else key.rpartition(".")[0]
    for section in prefix.split("."):
        tree = tree.setdefault(section, {})
    name = key[len(prefix) + 1 :]
    tree[json.loads(name) if name.startswith('"') else name] = value


def _status(key: str, value: object, where: Source) -> Iterator[Problem]:
    status = STATUS[key]
    if (tuple(value) if isinstance(value, list) else value) != status.default:
        yield Problem(status.level, where, key, value, f"{key} = {shown(value)}: {status.sentence}")


class _Findings:
    """The steps after the values: each uses what the ones before it found, and adds problems to `layers`."""

    def __init__(self, layers: Layers, config: Config, fallback: Source) -> None:
        self._layers = layers
        self._config = config
        self._fallback = fallback
        self.size: Any = None
        self.world: Degrees | None = None
        self.batch: BatchPlan | None = None

    def resolve_size(self, resolve: ResolveSize | None) -> None:
        """The model's size; a wrong field is reported at its own line."""
        model = self._config.model
        if resolve is None or any_doubt(["model.name", "model.flavor", OVERRIDE], self._layers.doubtful):
            return
        try:
            self.size = resolve(model.name, model.flavor, model.override)
        except SizeError as error:
            self._layers.doubtful.add("model.name")
            facts = self._facts()
            for each in error.problems:
                key = (
                    f"model.{each.field}" if each.field in ("name", "flavor") else f"{OVERRIDE}.{each.field}"
                )
                near = f"; did you mean '{each.nearest}'?" if each.nearest else ""
                written = [k for k in (key, *self._layers.sources) if k == key or is_override(k)]
                place = next(
                    (facts.source(k) for k in written if facts.written(k)), facts.source("model.flavor")
                )
                message = f"{key} = {shown(each.value)}: {each.message}{near}"
                where = place if place != DEFAULT else self._fallback
                self._layers.problems.append(Problem("error", where, key, each.value, message))

    def plan(self, world_size: int | None) -> None:
        """The world and the batch of the run."""
        if any_doubt(DEGREES, self._layers.doubtful):
            return
        world = plan_world(self._facts(), world_size)
        if isinstance(world, Problem):
            self._layers.problems.append(world)
            return
        self.world = world
        if any_doubt(BATCHES, self._layers.doubtful):
            return
        batch = plan_batch(self._facts(), world)
        if isinstance(batch, Problem):
            self._layers.problems.append(batch)
        else:
            self.batch = batch

    def apply_rules(self, device_type: str | None) -> None:
        """All rules that read no key in doubt."""
        self._layers.problems += apply_rules(self._facts(device_type), self._layers.doubtful)

    def _facts(self, device_type: str | None = None) -> Facts:
        return Facts(self._config, self._layers.sources, self.size, self.world, device_type, self._fallback)
