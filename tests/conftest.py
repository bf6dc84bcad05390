"""Fixtures that all tests share: warm ranks, and a logger that is as it was after each test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from titanish.testing.ranks import RankPool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests of eight ranks out unless they were asked for: `-m ranks8`."""
    if config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("ranks8")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """`pool(2)` and `pool(4)`: the warm ranks of that size, started when first asked for; `pool(8)` under
    `ranks8`."""
    pools: dict[int, RankPool] = {}

    def of_size(world_size: int) -> RankPool:
        if world_size > 4 and "ranks8" not in request.config.option.markexpr:
            pytest.fail(f"pool({world_size}): mark a test of more than four ranks with pytest.mark.ranks8")
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield of_size
    for ranks in pools.values():
        ranks.close()


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Undoes `setup_logging`, so that a test which calls it does not hide log lines from the next one's
    `caplog`; and what `activation_checkpoint.debug` does to torch's logger of operators: pytest puts its own
    handlers on a logger that does not propagate, and they cannot format that logger's arguments."""
    loggers = [logging.getLogger("titanish"), logging.getLogger("LoggingTensor")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
