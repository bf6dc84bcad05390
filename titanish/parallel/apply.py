"""`parallelize()`: the one place that knows in which order a model is split, wrapped and filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from titanish.parallel.fsdp import apply_fsdp
from titanish.parallel.init import initialize, materialize
from titanish.parallel.recompute import apply_recompute
from titanish.parallel.tensor import apply_tensor_parallel

if TYPE_CHECKING:
    from titanish.config.schema import ActivationCheckpoint, Parallelism
    from titanish.models.spec import ModelSpec
    from titanish.parallel.mesh import Mesh


def parallelize(
    model: nn.Module,
    spec: ModelSpec,
    size: Any,
    mesh: Mesh,
    *,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    param_dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """Turn `model`, built on the meta device, into this rank's share of it with initial weights.

    The order: tensor and sequence parallel, recompute, FSDP2, memory, weights. Recompute wraps the forward
    that tensor parallelism made, so that collectives are repeated with it; FSDP2 comes last since it shards
    what the others left.
    """
    decoder: Any = model
    if mesh.degrees.tp > 1:
        apply_tensor_parallel(
            model, mesh.tp, spec.tp_plan(size), sequence_parallel=parallelism.sequence_parallel
        )
    apply_recompute(decoder.layers, activation_checkpoint)
    apply_fsdp(
        model,
        decoder,
        mesh,
        param_dtype=param_dtype,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
    )
    materialize(model, device)
    initialize(model, lambda name: spec.init(size, name), seed)
    return model
