"""The sections about data and steps: `[training]`, `[validation]` and their dataloaders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titanish.config.sections.base import (
    LARGEST_STEP,
    AutoInt,
    AutoSize,
    PositiveInt,
    Section,
    Size,
    Steps,
)


class Dataloader(Section):
    """Processes that prepare batches ahead of training."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Worker processes per rank; 0 reads in the training process."""

    persistent_workers: bool = False
    """Keep workers alive between passes (training is one pass); needs `num_workers` of at least 1."""

    pin_memory: bool = False
    """Batches in page-locked memory, which a GPU copies faster."""

    prefetch_factor: PositiveInt | None = None
    """Batches that each worker prepares ahead; needs `num_workers` of at least 1."""


class Training(Section):
    """What is trained on, how much of it in a step, and in which precision."""

    dataset: str = "python_stdlib"
    """`python_stdlib`, `text`, `megatron` or `mock`."""

    dataset_path: str | None = None
    """Where the dataset lies: a file, folder or glob for `text`, a path prefix for `megatron`."""

    text_field: str = "text"
    """Field of a `.jsonl` line that holds the text."""

    add_bos: bool = True
    """Begin each document with the tokenizer's BOS token."""

    add_eos: bool = True
    """End each document with the tokenizer's EOS token."""

    cache_dir: str | None = None
    """Folder for tokenized text; absent: `$TITANISH_CACHE`, else `~/.cache/titanish`."""

    local_batch_size: Size = 8
    """Sequences in one forward pass of one data-parallel rank."""

    global_batch_size: AutoSize = -1
    """Sequences in one step over all ranks, reached by accumulation; -1: one forward pass per rank."""

    seq_len: Size = 2048
    """Tokens in a sequence."""

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients whose global norm is larger are scaled down to it; `inf` never clips."""

    steps: Steps = 10000
    """Optimizer steps of the whole run, resumed parts included."""

    max_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Training stops this many minutes after the start of its process, with a checkpoint; absent: never."""

    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type in which parameters compute; `auto`: bfloat16 on GPUs that have it, float32 elsewhere."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed over ranks."""

    gc_freq: PositiveInt = 50
    """Steps between two runs of Python's garbage collector, which is off otherwise."""

    gc_debug: bool = False
    """Log what the garbage collector found."""

    loss_chunk_tokens: Size = 1024
    """Tokens whose logits exist at the same time: less memory when small, fewer kernels when large."""

    dataloader: Dataloader = Dataloader()
    """Loading of training batches."""


class Validation(Section):
    """Loss on data that is not trained on."""

    enable: bool = False
    """Validate before the first step, every `freq` steps and after the last."""

    dataset: str | None = None
    """Kind of dataset; absent: the training dataset's own held-out part, or its kind at `dataset_path`."""

    dataset_path: str | None = None
    """Where the dataset lies, as for training."""

    local_batch_size: Size = 8
    """Sequences in one forward pass of one data-parallel rank."""

    seq_len: Size | None = None
    """Tokens in a sequence; absent: `training.seq_len`."""

    freq: PositiveInt = 10
    """Steps between two validations."""

    steps: Annotated[AutoInt, Field(le=LARGEST_STEP)] = -1
    """Validate on this many times `training.global_batch_size` sequences; -1: the whole dataset once."""

    dataloader: Dataloader = Dataloader()
    """Loading of validation batches."""
