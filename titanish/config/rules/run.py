"""Rules about the course of a run: schedule, precision, saving."""

from __future__ import annotations

from collections.abc import Iterator

from titanish.config.problem import Problem
from titanish.config.rules.base import Facts, rule


@rule("lr_scheduler", "training.steps")
def schedule_fits(facts: Facts) -> Iterator[Problem]:
    """Warm-up and decay share the schedule; what does not fit is clamped, and said."""
    schedule = facts.config.lr_scheduler
    key = "training.steps" if schedule.total_steps is None else "lr_scheduler.total_steps"
    total = schedule.total_steps or facts.config.training.steps
    warmup = min(schedule.warmup_steps, total)
    if schedule.warmup_steps > total:
        message = f"{facts.cite('lr_scheduler.warmup_steps')} is clamped to {facts.cite(key)}"
        yield facts.problem("note", "lr_scheduler.warmup_steps", message, key)
    decay = round(total * (schedule.decay_ratio or 0.0))
    if warmup + decay > total:
        message = (
            f"{facts.cite('lr_scheduler.decay_ratio')}: a decay of {decay} steps after {warmup} of warm-up"
            f" is clamped to the {total - warmup} that are left of {facts.cite(key)}"
        )
        yield facts.problem("note", "lr_scheduler.decay_ratio", message)


@rule("optimizer.name", "optimizer.momentum")
def momentum_is_used(facts: Facts) -> Iterator[Problem]:
    """Adam has its own running average."""
    if facts.config.optimizer.momentum and facts.config.optimizer.name != "SGD":
        key, name = "optimizer.momentum", facts.cite("optimizer.name")
        yield facts.problem("note", key, f"{facts.cite(key)} has no effect with {name}; only SGD reads it")


@rule("activation_checkpoint.mode")
def recompute_mode_is_there(facts: Facts) -> Iterator[Problem]:
    """`memory_budget` is a mode of the compiler."""
    key = "activation_checkpoint.mode"
    if facts.config.activation_checkpoint.mode == "memory_budget":
        message = f'{facts.cite(key)} comes with compilation; use "selective" or "full"'
        yield facts.problem("start", key, message)


@rule("checkpoint")
def saving_differs(facts: Facts) -> Iterator[Problem]:
    """Two keys of TorchTitan that have no effect here, for good or for now."""
    checkpoint = facts.config.checkpoint
    if checkpoint.last_save_model_only:
        message = (
            f"{facts.cite('checkpoint.last_save_model_only')}: the last step is saved whole, to be resumable"
        )
        yield facts.problem("note", "checkpoint.last_save_model_only", message)
    if checkpoint.async_mode != "disabled":
        message = (
            f"{facts.cite('checkpoint.async_mode')}: asynchronous saves come later; saves are synchronous"
        )
        yield facts.problem("note", "checkpoint.async_mode", message)


@rule("debug")
def warn_only_is_used(facts: Facts) -> Iterator[Problem]:
    """It weakens a mode that must be on."""
    if facts.config.debug.deterministic_warn_only and not facts.config.debug.deterministic:
        key = "debug.deterministic_warn_only"
        yield facts.problem("note", key, f"{facts.cite(key)} has no effect without debug.deterministic")


@rule("training.mixed_precision_param", "training.dataloader", "validation")
def device_has_it(facts: Facts) -> Iterator[Problem]:
    """What only a GPU does well, asked of a CPU."""
    if facts.device_type != "cpu":
        return
    key = "training.mixed_precision_param"
    if facts.config.training.mixed_precision_param == "bfloat16":
        yield facts.problem("note", key, f"{facts.cite(key)} is far slower than float32 on most CPUs")
    for key in ("training.dataloader.pin_memory", "validation.dataloader.pin_memory"):
        section = facts.config.training if key.startswith("training") else facts.config.validation
        if section.dataloader.pin_memory:
            yield facts.problem("note", key, f"{facts.cite(key)} has no effect without a GPU")
