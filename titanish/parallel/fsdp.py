"""Data parallelism by FSDP2, one path for all of it.

ZeRO-3 and ZeRO-2 are FSDP2 with and without resharding after forward; HSDP shards within and replicates
across; DDP is HSDP with a shard degree of one; a single process is FSDP2 on one rank, so that it gets the
same mixed precision as the rest (it costs nothing and is bitwise equal in float32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from titanish.models.spec import Decoder
    from titanish.parallel.mesh import Mesh


def apply_fsdp(
    model: nn.Module,
    decoder: Decoder,
    mesh: Mesh,
    *,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard `model` over the mesh, one group of parameters per layer; gradients are summed in float32.

    Activations keep their dtype between groups (`cast_forward_inputs=False`): weights in `param_dtype` set
    it, and rotation angles stay in float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    fsdp_mesh = mesh.fsdp
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    head, embedding = decoder.output, decoder.tok_embeddings
    if embedding is not None and (head is None or head.weight is not embedding.weight):
        fully_shard(embedding, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root group holds what the loss uses after the model's forward has returned (norm, head, a tied
    # embedding), so it must stay gathered until the backward pass.
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # The loss is already divided by the global number of labels: gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        if dist.get_backend(fsdp_mesh.get_group(fsdp_mesh.ndim - 1)) == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of `model` that own a group of sharded parameters."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def release_gathered(model: nn.Module) -> None:
    """Drop parameters still gathered after a forward that no backward follows; the next one must see new
    values."""
    for module in fsdp_modules(model):
        module.reshard()
