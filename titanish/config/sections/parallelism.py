"""The sections about memory and ranks: `[parallelism]` and `[activation_checkpoint]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from titanish.config.sections.base import AutoInt, PositiveInt, Section


class Parallelism(Section):
    """How many ranks share which dimension of the work; the product of the degrees is the world size."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Groups of ranks that hold the same parameters and read different data: HSDP, DDP if none shards."""

    data_parallel_shard_degree: AutoInt = -1
    """Ranks that read different data and share the parameters out (FSDP2); -1: all ranks that are left."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward: `always` (ZeRO-3, the default) or `never` (ZeRO-2)."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that share each layer's heads and widths; keep it within one node."""

    disable_loss_parallel: bool = False
    """With tensor parallel: gather the logits instead of computing the loss on vocabulary shards."""

    sequence_parallel: bool = True
    """With tensor parallel: activations between the sharded layers are shared out along the sequence."""

    reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """Sum gradients over ranks after every microbatch (less memory) or once a step (less traffic)."""


def _op_or_every_nth(value: str) -> str:
    if value == "op" or (value.isascii() and value.isdigit() and int(value) > 0):
        return value
    raise PydanticCustomError("selective_ac_option", 'must be "op" or a positive whole number in quotes')


class ActivationCheckpoint(Section):
    """Which activations are recomputed in the backward instead of being kept."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """`none` keeps all, `full` keeps each block's input, `selective` follows `selective_ac_option`."""

    selective_ac_option: Annotated[str, AfterValidator(_op_or_every_nth)] = "2"
    """`"op"` keeps the outputs of costly operations, `"n"` recomputes every n-th block whole."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: tuple[str, ...] = ("moe.router.gate",)
    """With `"op"`: linear layers, by a part of their name, whose products' shapes are always recomputed."""

    early_stop: bool = False
    """End a recomputation once the last tensor that the backward needs is there."""

    preserve_rng_state: bool = True
    """Recompute with the random state of the forward: dropout needs it."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of recomputed tensors with those of the forward, or do not."""

    debug: bool = False
    """On a mismatch show the operations of both passes; slow."""
