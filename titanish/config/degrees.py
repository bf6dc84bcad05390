"""The two equations of a run: which degrees make up the world, and which batches make up a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from titanish.config.schema import Parallelism, Training
from titanish.errors import ConfigError

_LARGEST_TRIED = 10**5
_MOST_LISTED = 8


@dataclass(frozen=True)
class Degrees:
    """Size of each mesh axis, outermost to innermost."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Number of groups of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which a parameter is sharded."""
        return self.dp_shard * self.cp

    @property
    def loss(self) -> int:
        """Number of ranks over which the loss of a step is summed."""
        return self.batch * self.cp

    def __str__(self) -> str:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        return f"world {self.world_size} = " + " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)


@dataclass(frozen=True)
class BatchPlan:
    """How the sequences of one optimizer step are shared out over ranks and forward passes."""

    global_batch_size: int
    local_batch_size: int
    batch_ranks: int
    seq_len: int

    @property
    def grad_accum(self) -> int:
        """Forward passes of each rank in a step."""
        return self.global_batch_size // (self.local_batch_size * self.batch_ranks)

    @property
    def samples_per_rank(self) -> int:
        """Sequences of each batch rank in a step."""
        return self.global_batch_size // self.batch_ranks

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch_size} = {self.batch_ranks} batch ranks"
            f" x {self.local_batch_size} local x {self.grad_accum} accumulation;"
            f" {self.global_batch_size * self.seq_len} tokens a step"
        )


def smallest_world(section: Parallelism) -> int:
    """The smallest world size that fits the degrees: a shard degree of -1 counts as 1."""
    return _fixed(section) * max(section.data_parallel_shard_degree, 1)


def resolve_degrees(section: Parallelism, world_size: int) -> Degrees:
    """The size of every mesh axis for this world size; a shard degree of -1 takes the ranks that are left.

    Raises ConfigError if the product of the degrees cannot be the world size.
    """
    shard = section.data_parallel_shard_degree
    fixed = _fixed(section)
    if shard == -1:
        if world_size % fixed:
            low = world_size // fixed * fixed
            sizes = " or ".join(str(size) for size in (low, low + fixed) if size)
            raise ConfigError(
                f"{_equation(section)} = {fixed} does not divide world size {world_size}; run on {sizes}"
                f" ranks, or choose degrees whose product is {nearest(divisors(world_size), fixed)}"
            )
        shard = world_size // fixed
    elif fixed * shard != world_size:
        if world_size % fixed == 0:
            cure = (
                f"set parallelism.data_parallel_shard_degree = {world_size // fixed} (or -1 for what is left)"
            )
        else:
            cure = f"choose degrees whose product is {world_size}"
        raise ConfigError(
            f"{_equation(section)} = {fixed * shard}, but the world size is {world_size};"
            f" {cure}, or run on {fixed * shard} ranks"
        )
    return Degrees(
        dp_replicate=section.data_parallel_replicate_degree, dp_shard=shard, tp=section.tensor_parallel_degree
    )


def resolve_batch(section: Training, batch_ranks: int) -> BatchPlan:
    """How a step's sequences fall on `batch_ranks`; a global batch of -1 is one forward pass on each.

    Raises ConfigError if the global batch does not divide into whole forward passes.
    """
    one_pass = section.local_batch_size * batch_ranks
    total = section.global_batch_size
    if total == -1:
        total = one_pass
    if total % one_pass:
        low = total // one_pass * one_pass
        around = " or ".join(str(size) for size in (low, low + one_pass) if size)
        message = (
            f"{total} sequences are no multiple of {batch_ranks} batch ranks x {section.local_batch_size}"
            f" (training.local_batch_size) = {one_pass}; nearest valid: {around}"
        )
        if total % batch_ranks == 0:
            fitting = nearest(divisors(total // batch_ranks), section.local_batch_size)
            message += f"; or a training.local_batch_size of {fitting}"
        raise ConfigError(message)
    return BatchPlan(total, section.local_batch_size, batch_ranks, section.seq_len)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending; beyond 10**10 the middle ones are left out, or a typo would take forever."""
    low = [d for d in range(1, min(math.isqrt(number), _LARGEST_TRIED) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def nearest(values: Iterable[int], wanted: int) -> str:
    """The values as a message lists them: all if they are few, else those nearest to the wanted one."""
    near = sorted(values, key=lambda value: abs(value - wanted))[:_MOST_LISTED]
    *most, last = (str(value) for value in sorted(near))
    return f"{', '.join(most)} or {last}" if most else last


def _fixed(section: Parallelism) -> int:
    return section.data_parallel_replicate_degree * section.tensor_parallel_degree


def _equation(section: Parallelism) -> str:
    factors = [f"dp_replicate {section.data_parallel_replicate_degree}"]
    if section.data_parallel_shard_degree != -1:
        factors.append(f"dp_shard {section.data_parallel_shard_degree}")
    return " x ".join([*factors, f"tp {section.tensor_parallel_degree}"])
