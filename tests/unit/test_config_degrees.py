"""The world equation and the batch equation."""

from __future__ import annotations

import pytest

from titanish.config.degrees import (
    BatchPlan,
    Degrees,
    divisors,
    nearest,
    resolve_batch,
    resolve_degrees,
    smallest_world,
)
from titanish.config.schema import Parallelism, Training
from titanish.errors import ConfigError


def parallelism(replicate: int = 1, shard: int = -1, tensor: int = 1) -> Parallelism:
    return Parallelism(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tensor,
    )


def test_shard_degree_takes_the_ranks_that_are_left() -> None:
    degrees = resolve_degrees(parallelism(replicate=2, tensor=2), 16)
    assert degrees == Degrees(dp_replicate=2, dp_shard=4, tp=2)


def test_degrees_say_their_equation() -> None:
    text = str(resolve_degrees(parallelism(tensor=2), 8))
    assert text == "world 8 = pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 2"


def test_views_are_products_of_axes() -> None:
    degrees = Degrees(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert (degrees.world_size, degrees.batch, degrees.fsdp, degrees.loss) == (2310, 15, 35, 105)


@pytest.mark.parametrize(
    ("section", "world", "message"),
    [
        (
            parallelism(tensor=3),
            8,
            "dp_replicate 1 x tp 3 = 3 does not divide world size 8; run on 6 or 9 ranks,"
            " or choose degrees whose product is 1, 2, 4 or 8",
        ),
        (
            parallelism(shard=2, tensor=2),
            8,
            "dp_replicate 1 x dp_shard 2 x tp 2 = 4, but the world size is 8; set"
            " parallelism.data_parallel_shard_degree = 4 (or -1 for what is left), or run on 4 ranks",
        ),
        (
            parallelism(replicate=3, shard=2),
            8,
            "dp_replicate 3 x dp_shard 2 x tp 1 = 6, but the world size is 8;"
            " choose degrees whose product is 8, or run on 6 ranks",
        ),
        (parallelism(tensor=2), 1, "= 2 does not divide world size 1; run on 2 ranks, or choose degrees"),
    ],
)
def test_degrees_that_are_not_the_world_are_refused(section: Parallelism, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(section, world)
    assert message in str(caught.value)


def test_smallest_world_leaves_nothing_to_shard() -> None:
    assert smallest_world(parallelism(replicate=2, tensor=4)) == 8
    assert smallest_world(parallelism(shard=3, tensor=4)) == 12


def test_accumulation_follows_from_the_global_batch() -> None:
    plan = resolve_batch(Training(global_batch_size=48, local_batch_size=8, seq_len=256), batch_ranks=2)
    assert (plan.grad_accum, plan.samples_per_rank) == (3, 24)
    expected = "global batch 48 = 2 batch ranks x 8 local x 3 accumulation; 12288 tokens a step"
    assert str(plan) == expected


def test_global_batch_of_minus_one_is_one_pass_per_rank() -> None:
    plan = resolve_batch(Training(local_batch_size=8, seq_len=2), batch_ranks=4)
    assert plan == BatchPlan(32, 8, 4, 2)
    assert plan.grad_accum == 1


def test_global_batch_that_is_no_multiple_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(Training(global_batch_size=20, local_batch_size=8), batch_ranks=2)
    assert str(caught.value) == (
        "20 sequences are no multiple of 2 batch ranks x 8 (training.local_batch_size) = 16;"
        " nearest valid: 16 or 32; or a training.local_batch_size of 1, 2, 5 or 10"
    )


@pytest.mark.parametrize(("number", "expected"), [(1, (1,)), (12, (1, 2, 3, 4, 6, 12)), (49, (1, 7, 49))])
def test_divisors_are_all_and_ascending(number: int, expected: tuple[int, ...]) -> None:
    assert divisors(number) == expected


def test_divisors_of_an_absurd_number_are_found_at_once() -> None:
    assert divisors(10**30)[:4] == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("values", "text"),
    [([3], "3"), ([4, 1], "1 or 4"), (range(1, 100), "46, 47, 48, 49, 50, 51, 52 or 53")],
)
def test_of_many_valid_values_the_nearest_are_listed(values: list[int], text: str) -> None:
    assert nearest(values, 50) == text
