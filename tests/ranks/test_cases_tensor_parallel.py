"""Tensor-parallel styles on a model with what Llama lacks: biases, LayerNorm, blocks shared by ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from titanish.models.plan import (
    Column,
    GatherSequence,
    Row,
    Sequence,
    Style,
    VocabEmbedding,
    VocabHead,
)
from titanish.parallel.init import materialize
from titanish.parallel.shards import local_box
from titanish.parallel.tensor import apply_tensor_parallel
from titanish.testing.ranks import RankPool

Pool = Callable[[int], RankPool]
Tensors = dict[str, Tensor]

PLAN: dict[str, Style] = {
    "tok_embeddings": VocabEmbedding(),
    "block.*_norm": Sequence(),
    "block.mlp": GatherSequence(),
    "block.mlp.up": Column(),
    "block.mlp.heads": Column(blocks=2),
    "block.mlp.down": Row(),
    "output": VocabHead(),
}


class Mlp(nn.Module):
    """Two column-split layers of which the second has two blocks, and a row-split one, all with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.heads = nn.Linear(6, 4)  # two blocks of 2
        self.down = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        up, heads = self.up(x), self.heads(x)
        # As grouped queries do: each block serves as many features of `up` as there are for it.
        served = heads.unflatten(-1, (-1, 2)).mean(-1)
        return self.down(up * served.repeat_interleave(up.size(-1) // served.size(-1), dim=-1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(6)
        self.rms_norm = nn.RMSNorm(6)
        self.mlp = Mlp()

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mlp(self.rms_norm(self.layer_norm(h)))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 6)
        self.block = Block()
        self.output = nn.Linear(6, 11)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.block(self.tok_embeddings(tokens))


def weights() -> Tensors:
    """Whole weights, each tensor its own; norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Toy().named_parameters()}


TOKENS = torch.tensor([[1, 10, 3, 7, 5], [0, 2, 9, 6, 10]])  # a sequence that no degree divides
DOWNSTREAM = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


def plain() -> tuple[Tensor, Tensor, Tensors]:
    """Hidden states, logits and gradients without any split."""
    model = Toy()
    model.load_state_dict(weights())
    hidden = model(TOKENS, torch.arange(5))
    (hidden * DOWNSTREAM).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), model.output(hidden).detach(), gradients


def split(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensors]:
    """The same over all ranks; each uses its own part of the hidden states, as the loss does."""
    tp, rank = dist.get_world_size(), dist.get_rank()
    model = toy_over(PLAN, sequence_parallel)
    whole = weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = whole[name]
            for dim, (start, length) in enumerate(local_box(parameter)):
                part = part.narrow(dim, start, length)
            parameter.to_local().copy_(part)
    hidden = model(TOKENS, torch.arange(5))
    (hidden * DOWNSTREAM)[..., rank::tp].sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return hidden.detach(), model.output(hidden), gradients


def toy_over(plan: dict[str, Style], sequence_parallel: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Toy()
    apply_tensor_parallel(model, mesh, plan, sequence_parallel=sequence_parallel)
    materialize(model, torch.device("cpu"))
    return model


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "without-sp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_compute_what_whole_ones_do(pool: Pool, ranks: int, sequence_parallel: bool) -> None:
    hidden, logits, gradients = plain()
    assert len(gradients) == 10  # all but those of the head, which is no part of the forward
    for ours in pool(ranks).run(split, sequence_parallel):
        assert torch.allclose(ours[0], hidden, atol=1e-6)
        assert torch.allclose(ours[1], logits, atol=1e-5)
        assert ours[2].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (ours[2][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def mistake(plan: dict[str, Style]) -> str:
    try:
        toy_over(plan, True)
    except AssertionError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {key: style for key, style in PLAN.items() if key != "block.*_norm"},
            "the tensor-parallel plan says nothing about ['block.layer_norm.weight', "
            "'block.layer_norm.bias', 'block.rms_norm.weight']",
        ),
        (
            {**PLAN, "block.mlp.heads": Column(blocks=3)},
            "3 blocks on 2 ranks; the config check refuses it",
        ),
        ({**PLAN, "block.mlp.up": Sequence()}, "no sequence-parallel form of Linear"),
    ],
    ids=["left-out", "blocks", "style"],
)
def test_a_plan_that_does_not_fit_is_our_mistake(pool: Pool, plan: dict[str, Style], message: str) -> None:
    assert pool(2).run(mistake, plan) == [message] * 2
