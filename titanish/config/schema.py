"""The whole configuration: every section under the name of its TOML table.

The names are TorchTitan's (v0.2.2) wherever the concept is the same. A key here is implemented; keys that are
known but not implemented stand in `titanish.config.status`.
"""

from __future__ import annotations

from titanish.config.sections.base import Section
from titanish.config.sections.checkpoint import Checkpoint
from titanish.config.sections.job import Comm, Debug, Job, Metrics
from titanish.config.sections.model import Model, Sample, Scalar
from titanish.config.sections.optim import LRScheduler, Optimizer
from titanish.config.sections.parallelism import ActivationCheckpoint, Parallelism
from titanish.config.sections.training import Dataloader, Training, Validation

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Config",
    "Dataloader",
    "Debug",
    "Job",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallelism",
    "Sample",
    "Scalar",
    "Section",
    "Training",
    "Validation",
]


class Config(Section):
    """All sections; each has its defaults, so an empty file is a valid one."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    validation: Validation = Validation()
    sample: Sample = Sample()
    comm: Comm = Comm()
    debug: Debug = Debug()
