"""The sections about a run as a whole: `[job]`, `[metrics]`, `[comm]` and `[debug]`."""

from __future__ import annotations

import posixpath
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from titanish.config.sections.base import Count, Name, PositiveInt, Seconds, Section

_OWN_FILES = ("config.toml", "metrics.jsonl", "events.jsonl")


def _not_the_runs_own(value: str) -> str:
    if posixpath.normpath(value) in _OWN_FILES:
        own = f"{', '.join(_OWN_FILES[:-1])} and {_OWN_FILES[-1]}"
        raise PydanticCustomError("own_file", f"must be another name: the run itself writes {own}")
    return value


class Job(Section):
    """What the run is called and where it leaves its files."""

    config_file: str | None = None
    """The TOML file to load. Only the flag `--job.config_file` has this effect; in a file it is a record."""

    dump_folder: Name = "./outputs"
    """Folder for everything that the run writes; relative folders of other sections lie below it."""

    description: str = "default job"
    """One line about the run, shown in its log."""

    print_config: bool = False
    """Write the resolved configuration, with the source of each value, to the log at the start."""

    save_config_file: Annotated[Name, AfterValidator(_not_the_runs_own)] | None = None
    """Name of a second copy of the resolved configuration below `dump_folder`, beside `config.toml`."""


class Metrics(Section):
    """What is reported while training, and where."""

    log_freq: PositiveInt = 10
    """Steps between two reports; the first step and the last are always reported."""

    enable_tensorboard: bool = False
    """Write TensorBoard events."""

    disable_color_printing: bool = False
    """No colour in the log, even on a terminal."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard events, below `job.dump_folder`."""

    save_for_all_ranks: bool = False
    """Every rank writes metrics, instead of one rank for all."""


class Comm(Section):
    """How long ranks wait for each other before the run is given up, and what is left to find out why."""

    init_timeout_seconds: Seconds = 300
    """Limit in seconds for a collective up to the end of the first step, which compiles and allocates."""

    train_timeout_seconds: Seconds = 100
    """Limit in seconds for a collective after the first step."""

    trace_buf_size: Count = 20000
    """Collectives that each rank remembers, for a trace when a connection is lost; 0 remembers none."""

    save_traces_folder: Name = "comm_traces"
    """Folder for these traces, below `job.dump_folder`."""

    save_traces_file_prefix: Name = "rank_"
    """A trace's file is named so, with the rank behind it."""


class Debug(Section):
    """Randomness, reproducibility, and the search for numbers that are not finite."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """The one seed of initial weights, data order and dropout."""

    deterministic: bool = False
    """Use deterministic algorithms only: slower, and an operation that has none is an error."""

    deterministic_warn_only: bool = False
    """With `deterministic`: warn about an operation without a deterministic algorithm instead of failing."""

    detect_anomaly: bool = False
    """End at the first loss, gradient or gradient norm that is not finite and say where it arose; slow."""
