"""Where a rank stands on each mesh axis: plain arithmetic, no torch.

Axes from outermost to innermost: pp, dp_replicate, dp_shard, cp, tp. Neighbouring ranks share a tp group,
which is what keeps tensor parallelism inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanish.config.degrees import Degrees


@dataclass(frozen=True)
class Coordinates:
    """One rank's index on every axis; `batch` counts dp_replicate x dp_shard (who reads different data)."""

    pp: int
    batch: int
    cp: int
    tp: int


def coordinates(degrees: Degrees, rank: int) -> Coordinates:
    """Where `rank` stands in the mesh of `degrees`."""
    rest, tp = divmod(rank, degrees.tp)
    rest, cp = divmod(rest, degrees.cp)
    pp, batch = divmod(rest, degrees.batch)
    return Coordinates(pp=pp, batch=batch, cp=cp, tp=tp)


def place(degrees: Degrees, rank: int) -> str:
    """A rank's place in words, e.g. "dp0 tp1"; axes of one rank are left out, "dp" always stands."""
    at = coordinates(degrees, rank)
    parts = [
        ("pp", degrees.pp, at.pp),
        ("dp", 0, at.batch),
        ("cp", degrees.cp, at.cp),
        ("tp", degrees.tp, at.tp),
    ]
    return " ".join(f"{axis}{index}" for axis, degree, index in parts if degree != 1)


def tp_spans_nodes(degrees: Degrees, local_world_size: int) -> bool:
    """Whether a tp group has ranks on several nodes, of `local_world_size` ranks each."""
    return local_world_size % degrees.tp != 0
