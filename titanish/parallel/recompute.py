"""Activation checkpointing: which layers, and which operators in them, are computed again in the backward
pass.

Modes mean what they mean in TorchTitan: "full" keeps only each layer's input; "selective" with option "n"
does so for every n-th layer; with option "op" every layer keeps the results of attention, of reductions over
ranks and of every second matrix product, and recomputes the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from titanish.config.schema import ActivationCheckpoint

_aten = torch.ops.aten
SAVED_OPERATORS: frozenset[Any] = frozenset(
    [
        _aten.mm.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        # scaling factors of low-precision training come from a max
        _aten.max.default,
    ]
)


def apply_recompute(layers: nn.ModuleDict, section: ActivationCheckpoint) -> None:
    """Make the layers that `section` chooses recompute their activations; names and state are untouched."""
    if section.mode == "none":
        return
    keywords: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": section.preserve_rng_state,
        "determinism_check": section.determinism_check,
        "early_stop": section.early_stop,
        "debug": section.debug,
    }
    every = 1
    if section.mode == "selective":
        if section.selective_ac_option == "op":
            recomputed = _weight_shapes(layers, section.per_op_sac_force_recompute_mm_shapes_by_fqns)
            keywords["context_fn"] = partial(_operator_contexts, recomputed)
        else:
            every = int(section.selective_ac_option)
    for index, layer in enumerate(layers.values()):
        if (index + 1) % every == 0:
            # The forward is wrapped, not the module: a wrapping module would change every parameter's name.
            layer.forward = partial(checkpoint, layer.forward, **keywords)


def _weight_shapes(layers: nn.ModuleDict, fragments: Iterable[str]) -> frozenset[torch.Size]:
    """Shapes, as the matrix product sees them, of the linear weights whose name holds one of `fragments`."""
    shapes = set()
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and any(fragment in name for fragment in fragments):
            weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            shapes.add(weight.t().shape)
    return frozenset(shapes)


def _operator_contexts(recomputed: frozenset[torch.Size]) -> Any:
    counts: dict[bool, int] = defaultdict(int)  # forward and recomputation count on their own

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator in SAVED_OPERATORS
        if operator is _aten.mm.default:
            if args[1].shape in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
