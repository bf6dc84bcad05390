"""How a model's modules may be split over tensor-parallel ranks, as data; no torch, no ranks.

A family maps module names (`*` stands for one part of a dotted name) to one of these styles, and
`parallel/tensor.py` carries them out. Without sequence parallelism the same plan applies: "sequence" then
means "replicated", and gathers and scatters become sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VocabEmbedding:
    """Rows of an embedding are split; the summed lookup leaves as sequence shards."""


@dataclass(frozen=True)
class Sequence:
    """Runs on this rank's share of the sequence with a replicated parameter (norms)."""


@dataclass(frozen=True)
class GatherSequence:
    """The first input is gathered along the sequence once, for all column-split layers inside."""


@dataclass(frozen=True)
class Column:
    """Output features of a linear layer are split.

    `blocks` says that the features are that many equal blocks (attention heads) which must stay whole. With
    more ranks than blocks the parameter is replicated and every rank computes the one block that it needs.
    """

    blocks: int | None = None


@dataclass(frozen=True)
class Row:
    """Input features of a linear layer are split; the partial sums leave as sequence shards."""


@dataclass(frozen=True)
class VocabHead:
    """Output features (the vocabulary) are split; the loss combines the shards without gathering logits."""


Style = VocabEmbedding | Sequence | GatherSequence | Column | Row | VocabHead
TensorParallelPlan = Mapping[str, Style]
