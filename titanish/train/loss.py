"""From hidden states to the summed cross-entropy: one function for training, validation and pipeline stages.

Logits of a whole batch are never kept. The head is applied to a chunk of tokens at a time, and the chunk's
gradients for hidden states and head weight are computed at once, while its logits exist; what is kept for the
backward pass is as large as the hidden states and the weight, not tokens x vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanish.data.loader import IGNORED_LABEL
from titanish.parallel.collectives import all_reduce
from titanish.parallel.tensor import local_parameter


@dataclass(frozen=True)
class TokenLoss:
    """Sum of token cross-entropies of hidden states under the head of a model.

    Attributes:
        head: the model's `output`; with tensor parallelism its weight is split over the vocabulary.
        chunk_tokens: how many tokens' logits exist at a time.
        tp_group: the ranks that share the vocabulary, or None.
        gather_logits: let every rank of `tp_group` see whole logits instead of combining statistics of
        shards.
        check: called with every sum, or None.
    """

    head: nn.Linear
    chunk_tokens: int
    tp_group: dist.ProcessGroup | None = None
    gather_logits: bool = False
    check: Callable[[Tensor], None] | None = None

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """(batch, seq, dim) and int64 (batch, seq) -> float32 scalar, the same on every rank of
        `tp_group`."""
        assert self.head.bias is None, "no family has a head with a bias"
        shard = _Shard.of(self.head.out_features, self.tp_group, self.gather_logits)
        weight = local_parameter(self.head.weight)  # (vocab/tp, dim)
        # Asked here: inside, `needs_input_grad` is also true under `no_grad`, which validation runs in.
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        total = _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1), weight, labels.flatten(), shard, self.chunk_tokens, wanted
        )
        if self.check is not None:
            self.check(total)
        return total


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary: ids first .. first + width - 1, of chunks of `widest`."""

    group: dist.ProcessGroup | None
    gather: bool
    vocab: int
    widest: int
    first: int

    @classmethod
    def of(cls, vocab: int, group: dist.ProcessGroup | None, gather: bool) -> _Shard:
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        widest = -(-vocab // ranks)
        return cls(group, gather and group is not None, vocab, widest, widest * rank)

    def whole(self, logits: Tensor) -> Tensor:
        """(tokens, vocab/tp) -> (tokens, vocab)."""
        assert self.group is not None
        padded = F.pad(logits, (0, self.widest - logits.size(-1)))
        shards = [torch.empty_like(padded) for _ in range(self.group.size())]
        dist.all_gather(shards, padded, group=self.group)
        return torch.cat(shards, dim=-1)[:, : self.vocab]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: _Shard, chunk: int, wanted: bool
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        for h, y, d_h in zip(
            hidden.split(chunk), labels.split(chunk), _split_or_none(d_hidden, hidden, chunk), strict=True
        ):
            logits = (h @ weight.t()).float()  # (chunk, vocab/tp)
            loss, d_logits = _cross_entropy(logits, y, shard, weight.size(0))
            total += loss
            if d_h is not None and d_weight is not None:
                d_logits = d_logits.to(weight.dtype)
                torch.mm(d_logits, weight, out=d_h)
                if d_weight.dtype == weight.dtype:
                    d_weight.addmm_(d_logits.t(), h)
                else:
                    d_weight += d_logits.t() @ h
        if wanted:
            assert d_weight is not None
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype), None, None, None, None


def _split_or_none(d_hidden: Tensor | None, hidden: Tensor, chunk: int) -> tuple[Tensor | None, ...]:
    if d_hidden is not None:
        return d_hidden.split(chunk)
    return (None,) * len(hidden.split(chunk))


def _cross_entropy(logits: Tensor, labels: Tensor, shard: _Shard, width: int) -> tuple[Tensor, Tensor]:
    """Summed loss of float32 (tokens, vocab/tp) logits and its gradient for them, written over the logits."""
    group, first = shard.group, shard.first
    if shard.gather:
        logits, group, first = shard.whole(logits), None, 0
    if not logits.size(-1):  # more ranks than the vocabulary fills: a column that no label names
        logits = logits.new_full((logits.size(0), 1), -torch.inf)
    peak = logits.amax(dim=-1)
    if group is not None:
        peak = all_reduce(peak, group, "max")
    logits -= peak.unsqueeze(-1)
    valid = labels != IGNORED_LABEL
    columns = labels - first
    here = valid & (columns >= 0) & (columns < logits.size(-1))
    columns = columns.masked_fill(~here, 0).unsqueeze(-1)
    target = logits.gather(-1, columns).squeeze(-1).masked_fill(~here, 0.0)
    exponentials = logits.exp_()
    total = exponentials.sum(dim=-1)
    if group is not None:
        total, target = all_reduce(torch.stack((total, target)), group).unbind()
    loss = ((total.log() - target) * valid).sum()
    d_logits = exponentials.mul_((valid / total).unsqueeze(-1))
    d_logits.scatter_add_(-1, columns, -here.to(d_logits.dtype).unsqueeze(-1))
    start = shard.first if shard.gather else 0
    return loss, d_logits[:, start : start + width]
