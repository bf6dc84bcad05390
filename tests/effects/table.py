"""All rows together, and how ranks find theirs: looks cannot be sent to them, keys can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tests.effects import rows, rows_ranks, rows_run
from tests.effects.ran import Effect

TABLES: tuple[dict[str, Effect], ...] = (
    rows.JOB,
    rows.MODEL,
    rows.SAMPLE,
    rows.DATA,
    rows.TRAINING,
    rows.VALIDATION,
    rows.OPTIMIZER,
    rows.SCHEDULE,
    rows_run.RECOMPUTE,
    rows_run.CHECKPOINT,
    rows_run.METRICS,
    rows_run.DEBUG,
    rows_run.COMM,
    rows_ranks.PARALLELISM,
    rows_ranks.METRICS,
)
EFFECTS: dict[str, Effect] = {key: effect for table in TABLES for key, effect in table.items()}


def see(keys: Sequence[str], folder: str, *, changed: bool) -> dict[str, Any]:
    """What the rows of `keys` see of one job in `folder`, with the change or without.

    Several keys may be asked about a job without it, if they share its setting.
    """
    effect = EFFECTS[keys[0]]
    ran = effect.train(folder, effect.change if changed else ())
    return {key: EFFECTS[key].look(ran) for key in keys} if _is_main() else {}


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
