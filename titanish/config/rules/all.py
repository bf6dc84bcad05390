"""The list of all rules, and the one function that applies them: to a check, a start and a plan alike."""

from __future__ import annotations

from collections.abc import Collection

from titanish.config.problem import Problem
from titanish.config.rules import data, model, run
from titanish.config.rules.base import Facts, Rule, any_doubt

RULES: tuple[Rule, ...] = (
    model.heads_divide_over_tp,
    model.every_tp_rank_has_a_part,
    model.positions_reach,
    model.bytes_fit_the_vocabulary,
    data.training_dataset_is_known,
    data.validation_dataset_is_known,
    data.training_path_is_there,
    data.validation_data_is_there,
    data.tokenizer_is_there,
    data.training_workers,
    data.validation_workers,
    run.schedule_fits,
    run.momentum_is_used,
    run.recompute_mode_is_there,
    run.saving_differs,
    run.warn_only_is_used,
    run.device_has_it,
)


def apply_rules(facts: Facts, doubtful: Collection[str]) -> list[Problem]:
    """What the rules find, leaving out those that read a key in doubt."""
    return [problem for each in RULES if not any_doubt(each.reads, doubtful) for problem in each.check(facts)]
