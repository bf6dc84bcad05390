"""Validation: the mean over tokens, the same on every mesh, with the weights of that moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.ranks.layouts import JOB, LAYOUTS, SGD, Layout
from titanish.data.loader import IGNORED_LABEL
from titanish.testing.equality import build_job
from titanish.testing.ranks import RankPool
from titanish.train.job import Job, train_step
from titanish.train.validate import Validation

Pool = Callable[[int], RankPool]
ROWS = 4  # of one batch over all ranks: three of them are the global batch, which is what is validated on
FLAGS = (
    *JOB,
    *SGD,
    "--validation.enable",
    "--validation.dataset=mock",
    "--validation.steps=1",
)


def validation_of(job: Job) -> Validation:
    return next(hook.validation for hook in job.hooks if hasattr(hook, "validation"))


def before_and_after_a_step(flags: tuple[str, ...]) -> tuple[list[float], list[torch.Tensor]]:
    """Validation twice before a step and once after it; and the gradients that it left."""
    job, _ = build_job(flags)
    validation = validation_of(job)
    losses = [validation.run(), validation.run()]
    left = [p.grad for p in job.model.parameters() if p.grad is not None]
    train_step(job, iter(job.loader))
    return [*losses, validation.run()], left


def command(layout: Layout) -> tuple[str, ...]:
    local = ROWS // (layout.shard * layout.replicate)
    return (*FLAGS, *layout.command_line(), f"--validation.local_batch_size={local}")


@pytest.mark.parametrize("name", ["fsdp2", "fsdp4", "ddp2", "tp2", "tp2-without-sp", "fsdp2-tp2"])
def test_every_mesh_validates_to_one_ranks_loss_with_the_weights_of_the_moment(pool: Pool, name: str) -> None:
    (first, again, after), left = pool(1).run(before_and_after_a_step, command(Layout()))[0]
    assert first == again
    assert abs(after - first) > 0.001
    assert left == []
    layout = LAYOUTS[name]
    # another batch than one rank's, and one that the data does not fill
    flags = (*command(layout), "--validation.local_batch_size=5")
    for losses, left in pool(layout.world_size).run(before_and_after_a_step, flags):
        assert losses == pytest.approx([first, again, after], rel=1e-6)
        assert left == []


def by_hand(flags: tuple[str, ...]) -> tuple[float, float, int]:
    """Validation's loss with uneven labels, and the mean over all tokens by torch."""
    job, _ = build_job(flags)
    validation = validation_of(job)
    model: Any = job.model
    batches = list(validation.batches)
    for index, batch in enumerate(batches):
        batch["labels"][:, 1 + 5 * index :] = IGNORED_LABEL
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model.output(model(batch["tokens"], torch.arange(33))).double()
            total += F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
            count += int((batch["labels"] != IGNORED_LABEL).sum())
    uneven = Validation(model, validation.loss, batches, validation.loss_group, validation.device)
    return uneven.run(), total / count, count


def test_tokens_weigh_alike_whatever_batch_they_are_in(pool: Pool) -> None:
    loss, expected, count = pool(1).run(by_hand, command(Layout()))[0]
    assert count == ROWS * (1 + 6 + 11)
    assert loss == pytest.approx(expected, rel=1e-6)


def plain_parameters_after_validation(flags: tuple[str, ...]) -> list[str]:
    """Parameters still whole on this rank."""
    job, _ = build_job(flags)
    validation_of(job).run()
    return [name for name, p in job.model.named_parameters() if not isinstance(p, DTensor)]


def test_a_rank_ends_validation_with_its_shards_alone(pool: Pool) -> None:
    assert pool(2).run(plain_parameters_after_validation, command(LAYOUTS["fsdp2"])) == [[], []]
