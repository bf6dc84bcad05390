"""Where ranks stand: neighbours share tp, then cp, then dp_shard, dp_replicate, and pp is outermost."""

from __future__ import annotations

import itertools

import pytest

from titanish.config.degrees import Degrees
from titanish.parallel.dims import Coordinates, coordinates, place, tp_spans_nodes


def test_ranks_count_from_the_innermost_axis() -> None:
    d = Degrees(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4)
    order = itertools.product(range(2), range(6), range(2), range(4))
    assert [coordinates(d, rank) for rank in range(d.world_size)] == [Coordinates(*at) for at in order]


@pytest.mark.parametrize(
    ("axes", "rank", "expected"),
    [
        (Degrees(), 0, "dp0"),
        (Degrees(dp_shard=4), 3, "dp3"),
        (Degrees(tp=2), 1, "dp0 tp1"),
        (Degrees(dp_replicate=2, dp_shard=2, tp=2), 7, "dp3 tp1"),
        (Degrees(pp=2, dp_shard=2, cp=2, tp=2), 13, "pp1 dp1 cp0 tp1"),
    ],
    ids=str,
)
def test_place_names_the_axes_that_there_are(axes: Degrees, rank: int, expected: str) -> None:
    assert place(axes, rank) == expected


@pytest.mark.parametrize(
    ("tp", "local", "spans"), [(1, 8, False), (8, 8, False), (4, 8, False), (16, 8, True), (4, 6, True)]
)
def test_tp_spans_nodes_unless_it_divides_their_ranks(tp: int, local: int, spans: bool) -> None:
    assert tp_spans_nodes(Degrees(tp=tp), local) == spans
