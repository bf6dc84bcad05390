"""Tensor and sequence parallelism: carries out a model's plan (`models/plan.py`) from outside.

Parameters become DTensors on the tp axis, so that FSDP2, checkpoints and initial weights know each shard's
place in the whole. Activations stay plain local tensors: a layer computes with this rank's shard of its
weight, and the collectives between layers are written out (`collectives.py`). Sizes need not divide: every
shard is what `torch.chunk` gives, which may be smaller on the last ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanish.models.plan import (
    Column,
    GatherSequence,
    Row,
    Sequence,
    Style,
    TensorParallelPlan,
    VocabEmbedding,
    VocabHead,
)
from titanish.parallel.collectives import gather_sequence, scatter_sequence_sum, share, sum_over


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis as layers see it."""

    mesh: DeviceMesh
    sequence_parallel: bool

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def enter(self, x: Tensor) -> Tensor:
        """What each rank's part of a split layer gets: the whole sequence."""
        return gather_sequence(x, self.group) if self.sequence_parallel else share(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums over ranks -> the sum, as sequence shards if sequence parallel."""
        return scatter_sequence_sum(x, self.group) if self.sequence_parallel else sum_over(x, self.group)


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan, *, sequence_parallel: bool
) -> None:
    """Split `model` (on the meta device) over `mesh` as `plan` says.

    Afterwards the model takes whole token rows and returns whole hidden states (batch, seq, dim) on every
    rank, of which each rank may use its own part: gradients of the parts are summed.
    """
    tp = TensorParallel(mesh, sequence_parallel)
    split: dict[int, nn.Parameter] = {}  # tied parameters stay one parameter
    for name, module in model.named_modules():
        style = _style_of(name, plan)
        if style is not None:
            _APPLY[type(style)](module, style, tp, split)
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not left, f"the tensor-parallel plan says nothing about {left}"
    _pad_and_gather(model, tp)


def _style_of(name: str, plan: Mapping[str, Style]) -> Style | None:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name):
            return style
    return None


def _pad_and_gather(model: nn.Module, tp: TensorParallel) -> None:
    """Whole rows in, whole hidden states out; a sequence that tp does not divide is padded in between.

    Causal attention keeps the padding at the end from being seen, and it is cut off before the loss.
    """
    forward: Callable[[Tensor, Tensor], Tensor] = model.forward

    def whole_sequence_forward(tokens: Tensor, positions: Tensor) -> Tensor:
        seq = tokens.size(1)
        missing = -seq % tp.size if tp.sequence_parallel else 0
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        h = tp.enter(forward(tokens, positions))
        if missing or not tp.sequence_parallel:
            return h[:, :seq].clone()  # FSDP2 hooks the output's gradient and warns of a view
        return h

    model.forward = whole_sequence_forward


# ---------------------------------------------------------------------------------------------- parameters


def _split_parameters(
    module: nn.Module, placements: Mapping[str, Placement], tp: TensorParallel, split: dict[int, nn.Parameter]
) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            continue
        if id(parameter) not in split:
            split[id(parameter)] = _distribute(parameter, placements[name], tp.mesh)
        module.register_parameter(name, split[id(parameter)])


def _distribute(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as a DTensor over `mesh`; on the meta device, so nothing is communicated."""
    local = parameter.data
    if isinstance(placement, Shard):
        dim, size = placement.dim, -(-parameter.size(placement.dim) // mesh.size())
        start = min(size * mesh.get_local_rank(), parameter.size(dim))
        local = local.narrow(dim, start, min(size, parameter.size(dim) - start)).contiguous()
    # from_local: shape and stride of the whole must be given where shards differ in size
    whole = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.size(), stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def local_parameter(parameter: Tensor | None, grad: Placement | None = None) -> Any:
    """This rank's plain shard of a parameter, differentiable.

    `grad` says what this rank's gradient of a replicated parameter is: `Partial()` where ranks must be
    summed.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[grad] if grad is not None else None)


# -------------------------------------------------------------------------------------------------- styles


def _apply_column(module: Any, style: Column, tp: TensorParallel, split: dict[int, nn.Parameter]) -> None:
    if style.blocks is not None and style.blocks % tp.size:
        assert tp.size % style.blocks == 0, (
            f"{style.blocks} blocks on {tp.size} ranks; the config check refuses it"
        )
        _split_parameters(module, {"weight": Replicate(), "bias": Replicate()}, tp, split)
        features = module.out_features // style.blocks
        start = tp.rank // (tp.size // style.blocks) * features
        module.forward = partial(_one_block_linear, module, start, features)
    else:
        _split_parameters(module, {"weight": Shard(0), "bias": Shard(0)}, tp, split)
        module.forward = partial(_column_linear, module)


def _column_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """(batch, seq, in) -> (batch, seq, out/tp)."""
    return F.linear(x, local_parameter(module.weight), local_parameter(module.bias))


def _one_block_linear(module: nn.Linear, start: int, features: int, x: Tensor) -> Tensor:
    """(batch, seq, in) -> (batch, seq, out/blocks): the block shared by several ranks."""
    weight, bias = (local_parameter(p, Partial()) for p in (module.weight, module.bias))
    return F.linear(
        x, weight.narrow(0, start, features), None if bias is None else bias.narrow(0, start, features)
    )


def _apply_row(module: Any, style: Row, tp: TensorParallel, split: dict[int, nn.Parameter]) -> None:
    _split_parameters(module, {"weight": Shard(1), "bias": Replicate()}, tp, split)
    module.forward = partial(_row_linear, module, tp)


def _row_linear(module: nn.Linear, tp: TensorParallel, x: Tensor) -> Tensor:
    """(batch, seq, in/tp) -> (batch, seq/tp, out); the bias is added once, after the sum."""
    out = tp.leave(F.linear(x, local_parameter(module.weight)))
    if module.bias is None:
        return out
    return out + local_parameter(module.bias, Partial() if tp.sequence_parallel else None)


def _apply_sequence(module: Any, style: Sequence, tp: TensorParallel, split: dict[int, nn.Parameter]) -> None:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    _split_parameters(module, dict.fromkeys(names, Replicate()), tp, split)
    # A shard of the sequence gives a shard of the gradient's sum; the whole sequence gives all of it.
    grad = Partial() if tp.sequence_parallel else Replicate()
    forms: dict[type, Callable[..., Tensor]] = {nn.RMSNorm: _rms_norm, nn.LayerNorm: _layer_norm}
    assert type(module) in forms, f"no sequence-parallel form of {type(module).__name__}"
    module.forward = partial(forms[type(module)], module, grad)


def _rms_norm(module: nn.RMSNorm, grad: Placement, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, local_parameter(module.weight, grad), module.eps)


def _layer_norm(module: nn.LayerNorm, grad: Placement, x: Tensor) -> Tensor:
    weight, bias = (local_parameter(p, grad) for p in (module.weight, module.bias))
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _apply_gather(
    module: nn.Module, style: GatherSequence, tp: TensorParallel, split: dict[int, nn.Parameter]
) -> None:
    module.register_forward_pre_hook(lambda module, args: (tp.enter(args[0]), *args[1:]))


def _apply_embedding(
    module: Any, style: VocabEmbedding, tp: TensorParallel, split: dict[int, nn.Parameter]
) -> None:
    _split_parameters(module, {"weight": Shard(0)}, tp, split)
    first = -(-module.num_embeddings // tp.size) * tp.rank
    module.forward = partial(_vocab_embedding, module, tp, first)


def _vocab_embedding(module: nn.Embedding, tp: TensorParallel, first: int, tokens: Tensor) -> Tensor:
    """(batch, seq) -> (batch, seq/tp, dim): each rank looks up the rows it holds, the rest are zeros."""
    weight = local_parameter(module.weight)
    if weight.size(0) == 0:  # more ranks than the vocabulary fills: take part in the sum with zeros
        weight = F.pad(weight, (0, 0, 0, 1))
    rows = tokens - first
    absent = (rows < 0) | (rows >= weight.size(0))
    found = F.embedding(rows.masked_fill(absent, 0), weight)
    return tp.leave(found.masked_fill(absent.unsqueeze(-1), 0.0))


def _apply_head(module: Any, style: VocabHead, tp: TensorParallel, split: dict[int, nn.Parameter]) -> None:
    _split_parameters(module, {"weight": Shard(0), "bias": Shard(0)}, tp, split)
    module.forward = partial(_vocab_head, module, tp)


def _vocab_head(module: nn.Linear, tp: TensorParallel, x: Tensor) -> Tensor:
    """(..., dim), equal on all ranks -> all logits (..., vocab). For sampling; the loss keeps its shards."""
    logits = F.linear(x, local_parameter(module.weight), local_parameter(module.bias))
    widest = -(-module.out_features // tp.size)
    shards = [logits.new_empty((*logits.shape[:-1], widest)) for _ in range(tp.size)]
    dist.all_gather(shards, F.pad(logits, (0, widest - logits.size(-1))), group=tp.group)
    return torch.cat(shards, dim=-1)[..., : module.out_features]


_APPLY: dict[type, Callable[..., None]] = {
    Column: _apply_column,
    Row: _apply_row,
    Sequence: _apply_sequence,
    GatherSequence: _apply_gather,
    VocabEmbedding: _apply_embedding,
    VocabHead: _apply_head,
}
