"""The loss over ranks: one mean over all labels, however vocabulary and rows are shared out.

The oracle is transformers in float64, in this process, from the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hf_llama import copy_weights, hf_llama
from tests.ranks.layouts import JOB, LAYOUTS, SGD, Layout
from titanish.data.loader import IGNORED_LABEL, StepBatch
from titanish.models.llama3.sizes import Size
from titanish.models.llama3.spec import SPEC
from titanish.testing.equality import build_job, loss_group, whole_tensors
from titanish.testing.ranks import RankPool
from titanish.train.job import run, update
from titanish.train.loss import TokenLoss
from titanish.train.step import PlainStep

Pool = Callable[[int], RankPool]
Weights = dict[str, Tensor]

TINY = Size(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=257, rope_theta=1e4)


def tiny_flags(size: Size) -> tuple[str, ...]:
    """The job of `layouts.py` with this model in it."""
    fields = dataclasses.asdict(size).items()
    return (
        *JOB,
        *SGD,
        "--training.max_norm=inf",
        *(f"--model.override.{key}={json.dumps(value)}" for key, value in fields),
    )


# ------------------------------------------------------------------------------------ vocabulary over ranks


def sharded_head_loss(vocab: int, chunk: int, gather: bool) -> tuple[float, Tensor, Tensor]:
    """Loss and whole gradients of hidden states and head, with the vocabulary shared by all ranks."""
    head, hidden, labels = whole_case(vocab)
    widest = -(-vocab // dist.get_world_size())
    rows = list(head.weight.detach().split(widest))
    rank = dist.get_rank()
    mine = rows[rank] if rank < len(rows) else head.weight.detach()[:0]
    head.weight = nn.Parameter(mine.clone())
    loss = TokenLoss(head, chunk, dist.group.WORLD, gather)(hidden, labels)
    (0.5 * loss).backward()
    dist.all_reduce(hidden.grad)
    shards: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(shards, head.weight.grad)
    return loss.item(), hidden.grad, torch.cat(shards)


def whole_case(vocab: int) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(24, vocab, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(2, 9, 24, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (2, 9), generator=generator)
    labels[0, 3:5] = IGNORED_LABEL
    return head, hidden, labels


@pytest.mark.parametrize("gather", [False, True], ids=["shards", "gathered"])
@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize(
    ("vocab", "ranks"),
    # 257 divides by nothing; of 5 over 4 ranks the shards are 2, 2, 1 and none
    [(257, 2), (257, 4), (5, 2), (5, 4)],
)
def test_loss_and_gradients_over_vocabulary_shards_are_torchs(
    pool: Pool, vocab: int, ranks: int, chunk: int, gather: bool
) -> None:
    head, hidden, labels = whole_case(vocab)
    h, w = (x.detach().double().requires_grad_() for x in (hidden, head.weight))
    expected = F.cross_entropy((h @ w.t()).flatten(0, 1), labels.flatten(), reduction="sum")
    (0.5 * expected).backward()
    for loss, d_hidden, d_weight in pool(ranks).run(sharded_head_loss, vocab, chunk, gather):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert (d_hidden - h.grad).norm() <= 1e-6 * h.grad.norm()
        assert (d_weight - w.grad).norm() <= 1e-6 * w.grad.norm()


# --------------------------------------------------------------- one mean over the labels of the whole batch


class GivenLosses(nn.Module):
    """A model and loss in one whose token losses are its input, times a weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return tokens * self.weight


def mean_of_given_losses(rows: list[list[float]], microbatch: int) -> tuple[float, float]:
    """The loss over all ranks of token losses `rows`, split over ranks, and its gradient by the weight."""
    model = GivenLosses()
    share = len(rows) // dist.get_world_size()
    mine = rows[dist.get_rank() * share : (dist.get_rank() + 1) * share]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0.0] * (width - len(row)) for row in mine])
    labels = torch.where(tokens > 0, 1, IGNORED_LABEL)

    def summed(losses: Tensor, labels: Tensor) -> Tensor:
        return losses[labels != IGNORED_LABEL].sum()

    step = PlainStep(model, summed, microbatch, dist.group.WORLD, torch.device("cpu"), True)
    total = torch.stack((step.run(StepBatch(tokens=tokens, labels=labels)), model.weight.grad))
    dist.all_reduce(total)
    return tuple(total.tolist())


@pytest.mark.parametrize(("ranks", "microbatch"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_loss_is_the_mean_over_all_labels(pool: Pool, ranks: int, microbatch: int) -> None:
    rows = [[1.0, 1.0, 1.0], [5.0], [2.0, 2.0], [4.0, 4.0, 4.0, 4.0]]
    for loss, gradient in pool(ranks).run(mean_of_given_losses, rows, microbatch):
        assert loss == pytest.approx(2.8, rel=1e-6)  # 28 / 10; not 3.0, the mean of means, nor 2.667
        assert gradient == pytest.approx(2.8, rel=1e-6)


UNEVEN = dataclasses.replace(TINY, norm_eps=1e-6, max_seq_len=256)


def uneven_batch() -> StepBatch:
    """Four rows of 3, 1, 2 and 4 labels."""
    ids = torch.randint(3, 257, (4, 17), generator=torch.Generator().manual_seed(7))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    for row, kept in enumerate((3, 1, 2, 4)):
        labels[row, kept:] = IGNORED_LABEL
    return StepBatch(tokens=tokens, labels=labels)


def one_step_from(
    flags: tuple[str, ...], size: Size, weights: Weights, batch: StepBatch
) -> tuple[float, float, Weights]:
    """Loss, gradient norm and weights after one step from `weights` on `batch`, rows over ranks."""
    job, batch_rank = build_job(flags)
    copy_weights(weights, job.model, size)
    batch_ranks = dist.get_world_size(job.step.batch_group)
    mine = {name: rows.chunk(batch_ranks)[batch_rank] for name, rows in batch.items()}
    loss = job.step.run(StepBatch(**mine))
    dist.all_reduce(loss, group=loss_group(job))
    result = update(job, loss)
    return loss.item(), result.grad_norm.item(), whole_tensors(job, lambda p: p)


@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        pytest.param(Layout(), 4, id="1-rank-4-microbatches"),
        pytest.param(Layout(shard=2), 2, id="2-ranks-2-microbatches"),
        pytest.param(Layout(shard=4), 1, id="4-ranks"),
        pytest.param(Layout(shard=2, tp=2), 2, id="fsdp2-tp2-2-microbatches"),
    ],
)
def test_uneven_labels_train_as_one_batch_does_in_transformers(
    pool: Pool, layout: Layout, accumulation: int
) -> None:
    reference, batch = hf_llama(UNEVEN, torch.float64), uneven_batch()
    weights = {name: p.detach().float() for name, p in reference.named_parameters()}
    logits = reference(batch["tokens"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 10
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    assert loss.item() == pytest.approx(5.673980121, abs=1e-9)
    assert norm.item() == pytest.approx(5.228571181, abs=1e-9)

    flags = (
        *tiny_flags(UNEVEN),
        *layout.command_line(),
        "--training.global_batch_size=4",
        f"--training.local_batch_size={4 // (layout.shard * accumulation)}",
        "--training.seq_len=16",
    )
    ours, our_norm, our_weights = pool(layout.world_size).run(one_step_from, flags, UNEVEN, weights, batch)[0]
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    assert our_norm == pytest.approx(norm.item(), rel=1e-5)
    names = SPEC.hf_names(UNEVEN)
    for name, tensor in our_weights.items():
        parameter = reference.get_parameter(names[name])
        expected = parameter.detach() - 0.5 * parameter.grad
        assert (tensor - expected).norm() <= 1e-5 * expected.norm(), name
        assert not torch.equal(tensor, weights[names[name]]), name


# ---------------------------------------------------------------------------------------- the loss displayed


def displayed_first_loss(flags: tuple[str, ...], size: Size, weights: Weights) -> list[Tensor]:
    """Runs the whole job, hooks and all, from `weights`; this rank's tokens and labels."""
    job, _ = build_job(flags)
    copy_weights(weights, job.model, size)
    batch = next(iter(job.loader))
    run(job)
    return [batch["tokens"], batch["labels"]]


@pytest.mark.parametrize("zero_head", [False, True], ids=["", "zero-logits"])
@pytest.mark.parametrize("name", ["tp2", "tp2-without-sp", "tp2-gathered", "fsdp2-tp2", "fsdp2"])
def test_displayed_loss_is_that_of_transformers(
    pool: Pool, tmp_path: Path, name: str, zero_head: bool
) -> None:
    layout = {"tp2-gathered": Layout(tp=2, flags=("--parallelism.disable_loss_parallel",)), **LAYOUTS}[name]
    reference = hf_llama(TINY, torch.float64)
    if zero_head:
        nn.init.zeros_(reference.lm_head.weight)
    weights = {key: p.detach().float() for key, p in reference.named_parameters()}
    flags = (*tiny_flags(TINY), *layout.command_line(), f"--job.dump_folder={tmp_path}", "--training.steps=1")
    ranks = pool(layout.world_size).run(displayed_first_loss, flags, TINY, weights)
    # one rank of each tp group: they are neighbours and read the same
    tokens, labels = (torch.cat([rank[i] for rank in ranks[:: layout.tp]]) for i in (0, 1))
    logits = reference(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    if zero_head:
        assert row["loss"] == pytest.approx(math.log(257), rel=1e-6)
