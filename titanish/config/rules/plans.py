"""The model's size, the world and the batch of a run, or the problem that there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from titanish.config.degrees import BatchPlan, Degrees, resolve_batch, resolve_degrees, smallest_world
from titanish.config.keys import OVERRIDE, is_override
from titanish.config.problem import Problem
from titanish.config.rules.base import Facts
from titanish.config.spelling import shown
from titanish.errors import ConfigError, SizeError, SizeProblem

ResolveSize = Callable[[str, str, Mapping[str, object]], Any]
"""(model.name, model.flavor, model.override) -> size; raises errors.SizeError."""

SIZES = ("model.name", "model.flavor", OVERRIDE)

DEGREES = (
    "parallelism.tensor_parallel_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree",
)
MESH = (*DEGREES, "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree")
"""All factors of the world size: while one of them has no effect yet, the equation would only mislead."""

BATCHES = ("training.global_batch_size", "training.local_batch_size", "training.seq_len")


def plan_size(facts: Facts, resolve: ResolveSize) -> Any:
    """The model's size, or the list of problems with it, each at the line of the wrong field."""
    model = facts.config.model
    try:
        return resolve(model.name, model.flavor, model.override)
    except SizeError as error:
        return [_size_problem(facts, each) for each in error.problems]


def _size_problem(facts: Facts, wrong: SizeProblem) -> Problem:
    key = f"model.{wrong.field}" if wrong.field in ("name", "flavor") else f"{OVERRIDE}.{wrong.field}"
    near = f"; did you mean '{wrong.nearest}'?" if wrong.nearest else ""
    what = f"{key} = {shown(wrong.value)}"
    # A field may clash with an override of another one: then that override, or else the flavor, is to blame.
    candidates = [key, *(k for k in facts.sources if is_override(k)), "model.flavor", "model.name"]
    if not facts.written(key) and is_override(key):
        what += f" ({facts.cite('model.flavor')})"
    place = next((facts.source(k) for k in candidates if facts.written(k)), facts.fallback)
    return Problem("error", place, key, wrong.value, f"{what}: {wrong.message}{near}")


def plan_world(facts: Facts, world_size: int | None) -> Degrees | Problem:
    """The mesh for this world size; None stands for the smallest one that fits."""
    section = facts.config.parallelism
    try:
        return resolve_degrees(section, smallest_world(section) if world_size is None else world_size)
    except ConfigError as error:
        written = [key for key in DEGREES if facts.written(key)] or list(DEGREES)
        return facts.problem("error", written[0], f"{', '.join(facts.cite(k) for k in written)}: {error}")


def plan_batch(facts: Facts, degrees: Degrees) -> BatchPlan | Problem:
    """The batches of a step on this mesh."""
    try:
        return resolve_batch(facts.config.training, degrees.batch)
    except ConfigError as error:
        key, other, _ = BATCHES
        return facts.problem("error", key, f"{facts.cite(key)} with {facts.cite(other)}: {error}", other)
