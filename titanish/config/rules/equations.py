"""The world and the batch of a run, or the problem that there is none."""

from __future__ import annotations

from titanish.config.degrees import BatchPlan, Degrees, resolve_batch, resolve_degrees, smallest_world
from titanish.config.problem import Problem
from titanish.config.rules.base import Facts
from titanish.errors import ConfigError

DEGREES = (
    "parallelism.tensor_parallel_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.data_parallel_replicate_degree",
)
BATCHES = ("training.global_batch_size", "training.local_batch_size", "training.seq_len")


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
