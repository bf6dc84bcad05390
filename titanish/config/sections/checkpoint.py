"""The section about saving and resuming: `[checkpoint]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titanish.config.sections.base import Count, PositiveInt, Section


class Checkpoint(Section):
    """What is saved, how often, and where a run goes on."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one."""

    folder: str = "checkpoint"
    """Folder for checkpoints, below `job.dump_folder`."""

    interval: PositiveInt = 500
    """Steps between two saves; the last step is always saved."""

    keep_latest_k: Count = 10
    """Complete checkpoints that are kept; 0 keeps all. The newest complete one is never deleted."""

    load_step: Annotated[int, Field(ge=-1)] = -1
    """Step to resume from; -1: the newest complete one."""

    enable_first_step_checkpoint: bool = False
    """Save after the first step as well, to find trouble with saving early."""

    last_save_model_only: bool = False
    """The last step is saved whole whatever this says, so that a finished run can be prolonged."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Saves are synchronous whatever this says."""
