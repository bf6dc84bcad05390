"""What changing each key changes, continued: recomputing, saving, reporting, waiting, seeding."""

from __future__ import annotations

import torch

from tests.effects.ran import ANY, Effect, Ran, files

_LAYERS, _PASSES = 2, 4
_ALL = "--activation_checkpoint.mode=full"
_OP = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")


def _layer_runs(ran: Ran) -> int:
    """How often a layer ran, in the forward pass and again in the backward."""
    return len(ran.draws)


def _products_again(ran: Ran) -> int:
    """How many of a layer's seven matrix products the backward computed again, over all layers and passes."""
    in_layers = 7 * 3 * _LAYERS * _PASSES  # forward, and backward for the input and for the weight
    in_loss = 2 * len(ran.logits)  # the third, for the weight of the head, is an addmm
    return ran.operators["aten::mm"] - in_layers - in_loss


RECOMPUTE = {
    "activation_checkpoint.mode": Effect((_ALL,), _layer_runs, _LAYERS * _PASSES, 2 * _LAYERS * _PASSES),
    "activation_checkpoint.selective_ac_option": Effect(  # every second layer, every layer
        ("--activation_checkpoint.selective_ac_option=1",),
        _layer_runs,
        (_LAYERS + 1) * _PASSES,
        2 * _LAYERS * _PASSES,
        given=("--activation_checkpoint.mode=selective",),
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Effect(
        ('--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=["w1", "w2", "w3"]',),
        _products_again,
        3 * _LAYERS * _PASSES,  # every second of seven
        (2 + 3) * _LAYERS * _PASSES,  # every second of attention's four, and all of the feed-forward's three
        given=_OP,
    ),
    "activation_checkpoint.early_stop": Effect(  # no backward needs the last product's result
        ("--activation_checkpoint.early_stop",),
        _products_again,
        7 * _LAYERS * _PASSES,
        6 * _LAYERS * _PASSES,
        given=(_ALL,),
    ),
    "activation_checkpoint.preserve_rng_state": Effect(  # a layer draws the same again, or something else
        ("--no-activation_checkpoint.preserve_rng_state",),
        lambda ran: len(set(ran.draws)),
        _LAYERS * _PASSES,
        2 * _LAYERS * _PASSES,
        given=(_ALL,),
    ),
}

_SAVE = ("--checkpoint.enable",)


def _saved(ran: Ran) -> list[str]:
    return files("step-*")


CHECKPOINT = {
    "checkpoint.enable": Effect(_SAVE, _saved, [], ["outputs/checkpoint/step-2"]),
    "checkpoint.folder": Effect(
        ("--checkpoint.folder=saved",),
        _saved,
        ["outputs/checkpoint/step-2"],
        ["outputs/saved/step-2"],
        given=_SAVE,
    ),
    "checkpoint.interval": Effect(
        ("--checkpoint.interval=1",),
        _saved,
        ["outputs/checkpoint/step-2"],
        ["outputs/checkpoint/step-1", "outputs/checkpoint/step-2"],
        given=_SAVE,
    ),
    "checkpoint.keep_latest_k": Effect(
        ("--checkpoint.keep_latest_k=1",),
        _saved,
        ["outputs/checkpoint/step-1", "outputs/checkpoint/step-2"],
        ["outputs/checkpoint/step-2"],
        given=(*_SAVE, "--checkpoint.interval=1"),
    ),
    "checkpoint.load_step": Effect(
        ("--checkpoint.load_step=1",),
        lambda ran: len(ran.trained) // 2,
        1,  # from step 2 on
        2,  # from step 1 on
        given=(*_SAVE, "--checkpoint.interval=1", "--training.steps=3"),
        earlier=("--training.steps=2",),
    ),
    "checkpoint.enable_first_step_checkpoint": Effect(
        ("--checkpoint.enable_first_step_checkpoint",),
        _saved,
        ["outputs/checkpoint/step-2"],
        ["outputs/checkpoint/step-1", "outputs/checkpoint/step-2"],
        given=_SAVE,
    ),
}

_EVENTS = ("--metrics.enable_tensorboard",)


def _event_folders(ran: Ran) -> list[str]:
    return [name.rpartition("/")[0] for name in files("events.out.tfevents.*")]


METRICS = {
    "metrics.log_freq": Effect(
        ("--metrics.log_freq=2",),
        lambda ran: [row["step"] for row in ran.rows],
        [1, 2, 3, 4, 5],
        [1, 2, 4, 5],  # the first and the last always
        given=("--training.steps=5",),
    ),
    "metrics.enable_tensorboard": Effect(_EVENTS, _event_folders, [], ["outputs/tb"]),
    "metrics.save_tb_folder": Effect(
        ("--metrics.save_tb_folder=events",),
        _event_folders,
        ["outputs/tb"],
        ["outputs/events"],
        given=_EVENTS,
    ),
    "metrics.disable_color_printing": Effect(
        ("--metrics.disable_color_printing",),
        lambda ran: "\x1b[0m step 1/2" in ran.log,
        True,
        False,
        terminal=True,
    ),
}

DEBUG = {
    "debug.seed": Effect(
        ("--debug.seed=43",), lambda ran: ran.initial["output.weight"][0, 0].item(), ANY, ANY
    ),
    "debug.deterministic": Effect(
        ("--debug.deterministic",), lambda ran: torch.are_deterministic_algorithms_enabled(), False, True
    ),
    "debug.deterministic_warn_only": Effect(
        ("--debug.deterministic_warn_only",),
        lambda ran: torch.is_deterministic_algorithms_warn_only_enabled(),
        False,
        True,
        given=("--debug.deterministic",),
    ),
    "debug.detect_anomaly": Effect(
        ("--debug.detect_anomaly",),
        lambda ran: (
            type(ran.job.step).__name__,
            [type(h).__name__ for h in ran.job.hooks].count("FiniteHook"),
        ),
        ("PlainStep", 0),
        ("AnomalyStep", 1),
    ),
}

COMM = {
    "comm.init_timeout_seconds": Effect(
        ("--comm.init_timeout_seconds=77",),
        lambda ran: [timeout.total_seconds() for timeout in ran.timeouts[0]],
        [300, 300],
        [77, 77],
    ),
    "comm.train_timeout_seconds": Effect(
        ("--comm.train_timeout_seconds=55",),
        lambda ran: [timeout.total_seconds() for timeout in ran.timeouts[-1]],
        [100, 100],
        [55, 55],
    ),
}
