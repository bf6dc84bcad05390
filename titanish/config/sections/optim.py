"""The sections about the update: `[optimizer]` and `[lr_scheduler]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titanish.config.sections.base import LARGEST_STEP, Decay, FiniteFloat, Fraction, Section, Steps


class Optimizer(Section):
    """How gradients change parameters."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """The optimizer."""

    lr: Annotated[FiniteFloat, Field(gt=0)] = 8e-4
    """Learning rate at the schedule's peak."""

    beta1: Decay = 0.9
    """Adam: decay of the mean of gradients."""

    beta2: Decay = 0.95
    """Adam: decay of the mean of squared gradients."""

    eps: Annotated[FiniteFloat, Field(gt=0)] = 1e-8
    """Adam: added to the root of the mean square."""

    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.1
    """Weight decay: decoupled from the gradient for AdamW, added to it for Adam and SGD."""

    momentum: Decay = 0.0
    """SGD: share of the previous update that is kept."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """The kernel: one parameter at a time, lists of them, or one fused kernel; `fused` SGD runs `foreach`."""


class LRScheduler(Section):
    """Learning rate over the run: linear warm-up, a constant part, decay."""

    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_STEP)] = 200
    """Steps of linear warm-up; clamped to the length of the schedule."""

    total_steps: Steps | None = None
    """Length of the schedule in steps; absent: `training.steps`."""

    decay_ratio: Fraction | None = None
    """Share of the schedule that decays, at its end; absent: all of it after the warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """The final learning rate as a share of the peak."""
