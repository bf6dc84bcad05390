"""One whole training job inside a test's rank, and what there was to see of it.

`train` is `python -m titanish.train` from its flags to its exit, on a model so small that a job takes a
moment. It is watched from outside: by hooks on modules, a dispatch mode, wrapped functions, and the files
and lines that are written. All of it computes as it does unwatched; only garbage is not collected, since that
would take half of such a job's time.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import titanish.train.assemble
import titanish.train.job
import titanish.train.loss
from tests.ranks.layouts import JOB
from titanish.data.indexed import IndexedWriter
from titanish.runtime.process_group import RANK_VARIABLES
from titanish.testing.equality import loss_group
from titanish.train.__main__ import main
from titanish.train.hooks import ValidateHook
from titanish.train.job import Job
from titanish.train.validate import Validation

BASE = (
    *(flag for flag in JOB if not flag.startswith("--job.dump_folder")),
    "--training.local_batch_size=6",
    "--training.steps=2",
    "--metrics.log_freq=1",
)
"""Two steps of two forward passes of (6, 33) tokens, each step reported."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of the model: its (batch, seq) tokens, the type it computed in, and the processes that
    loaded data meanwhile."""

    tokens: Tensor
    dtype: torch.dtype
    loaders: frozenset[int]


@dataclass
class Ran:
    """What a job did.

    Attributes:
        log: all that it wrote to standard error.
        trained: the forward passes of training.
        judged: the forward passes without gradients: validation's, then those of the sample.
        layer_inputs: shapes that the last layer was given, recomputations included.
        draws: a random number for every time that a layer's feed-forward ran, recomputations included.
        logits: shapes of the logits that existed at a time.
        operators: how often each operator ran during training, collectives included.
        reduced: the types in which gradients were summed over ranks.
        collections: how often garbage was collected during training.
        initial: this rank's initial weights.
        timeouts: of the default group and of the loss group, before and after training.
    """

    job: Job
    initial: dict[str, Tensor]
    log: str = ""
    trained: list[Pass] = field(default_factory=list)
    judged: list[Pass] = field(default_factory=list)
    layer_inputs: list[torch.Size] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    logits: list[torch.Size] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    reduced: set[torch.dtype] = field(default_factory=set)
    collections: int = 0
    timeouts: list[tuple[timedelta, timedelta]] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What `metrics.jsonl` holds."""
        return [json.loads(line) for line in Path("outputs/metrics.jsonl").read_text().splitlines()]

    @property
    def validated_at(self) -> list[int]:
        """The steps that a validation loss was reported for."""
        return [row["step"] for row in self.rows if "validation_loss" in row]

    @property
    def validation(self) -> Validation:
        """The validation that the job runs."""
        return next(hook.validation for hook in self.job.hooks if isinstance(hook, ValidateHook))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that the optimizer updates with."""
        return self.job.optimizer.param_groups[0]

    def weight(self, name: str = "layers.0.attention.wq.weight") -> DTensor:
        """A parameter as it is split over the ranks."""
        parameter = self.job.model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        return parameter

    def update_norm(self) -> float:
        """The L2 norm of all that training changed, on one rank."""
        changes = [
            local(parameter) - self.initial[name] for name, parameter in self.job.model.named_parameters()
        ]
        return torch.stack([change.norm() for change in changes]).norm().item()


def tokens_of(passes: Sequence[Pass]) -> list[int]:
    """The different token ids in some forward passes, ascending."""
    return torch.cat([each.tokens.flatten() for each in passes]).unique().tolist()


def letters_of(passes: Sequence[Pass]) -> str:
    """The different letters in some forward passes over bytes."""
    return "".join(chr(token) for token in tokens_of(passes) if token < 256)


def shapes_of(passes: Sequence[Pass]) -> list[tuple[int, ...]]:
    """The shapes of some forward passes' tokens."""
    return [tuple(each.tokens.shape) for each in passes]


def files(pattern: str) -> list[str]:
    """What the job wrote under names that match, below the folder it ran in."""
    return sorted(path.as_posix() for path in Path().rglob(pattern))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a copy."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(folder: str, flags: Sequence[str], *, terminal: bool = False) -> Ran:
    """Train with `BASE` and `flags` in `folder`, where `_inputs` lie and everything is written.

    One rank trains as a process without a launcher and starts its own group; several use the group that
    runs. With `terminal` the log takes standard error for one.
    """
    os.chdir(folder)
    os.environ["TITANISH_CACHE"] = "cache"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        _leave_group()
    if int(os.environ.get("RANK", "0")) == 0:
        _inputs()
    if dist.is_initialized():
        dist.barrier()
    stream = _Terminal() if terminal else io.StringIO()
    with contextlib.redirect_stderr(stream), _watching() as seen:
        code = main([*BASE, *flags])
    assert code == 0, stream.getvalue()
    (ran,) = seen
    ran.log = stream.getvalue()
    return ran


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def _inputs() -> None:
    """What the rows read: texts of one letter each, token files, tokenizers of one letter each."""
    lines = [json.dumps({"text": "a" * 60, "body": "b" * 60})] * 20
    Path("text.jsonl").write_text("\n".join(lines))
    Path("other.jsonl").write_text(json.dumps({"text": "c" * 500}))
    Path("job.toml").write_text('[job]\ndescription = "written in a file"\n')
    for name, token in (("tokenizer", 7), ("other-tokenizer", 8)):
        made = tokenizers.Tokenizer(WordLevel({"a": token, "?": 0}, unk_token="?"))
        made.pre_tokenizer = Split("", "isolated")
        Path(name).mkdir(exist_ok=True)
        made.save(f"{name}/tokenizer.json")
    if not Path("tokens.bin").exists():
        with IndexedWriter(Path("tokens"), np.dtype("uint16")) as writer:
            writer.add_document([5] * 500)


@contextlib.contextmanager
def _watching() -> Iterator[list[Ran]]:
    """Collects the `Ran` of the job that is assembled and run inside."""
    seen: list[Ran] = []
    assemble, run = titanish.train.assemble.assemble, titanish.train.job.run
    cross_entropy = titanish.train.loss._cross_entropy

    def watched_assemble(*args: Any) -> Job:
        job = assemble(*args)
        seen.append(Ran(job, {name: local(p) for name, p in job.model.named_parameters()}))
        _watch_modules(job.model, seen[0])
        return job

    def watched_run(job: Job) -> None:
        (ran,) = seen
        ran.timeouts.append((_timeout(dist.group.WORLD), _timeout(loss_group(job))))
        with _Operators(ran):
            run(job)
        ran.timeouts.append((_timeout(dist.group.WORLD), _timeout(loss_group(job))))

    def counted_collect() -> int:
        for ran in seen:  # none before there is a job
            ran.collections += 1
        return 0

    def watched_cross_entropy(logits: Tensor, *args: Any) -> Any:
        seen[0].logits.append(logits.shape)
        return cross_entropy(logits, *args)

    with (
        patch.object(titanish.train.assemble, "assemble", watched_assemble),
        patch.object(titanish.train.job, "run", watched_run),
        patch.object(titanish.train.loss, "_cross_entropy", watched_cross_entropy),
        patch.object(gc, "collect", counted_collect),
    ):
        yield seen


def _watch_modules(model: Any, ran: Ran) -> None:
    def forward_pass(module: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> None:
        loaders = frozenset(child.pid for child in multiprocessing.active_children() if child.pid)
        passes = ran.trained if torch.is_grad_enabled() else ran.judged
        passes.append(Pass(args[0].detach().clone(), hidden.dtype, loaders))

    def feed_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        ran.draws.append(torch.rand(()).item())

    def last_layer(module: nn.Module, args: tuple[Any, ...]) -> None:
        ran.layer_inputs.append(args[0].shape)

    model.register_forward_hook(forward_pass)
    layers = list(model.layers.values())
    layers[-1].register_forward_pre_hook(last_layer)
    for layer in layers:
        layer.feed_forward.register_forward_pre_hook(feed_forward)


class _Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.ran.operators[name] += 1
        if name == "c10d::_reduce_scatter_base_":
            self.ran.reduced.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _timeout(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@dataclass(frozen=True)
class Effect:
    """What changing a key changes.

    Attributes:
        change: the flags that change it; another key is among them only where the two are tied.
        look: what is looked at, on the rank that trained.
        before: what is seen without the change; `ANY` if a number would say nothing to a reader.
        after: what is seen with it, always something else.
        given: flags without which the key has no say, part of both jobs.
        earlier: flags of a job that ran in the same folder before.
        terminal: whether standard error is one.
        ranks: how many ranks train.
    """

    change: tuple[str, ...]
    look: Callable[[Ran], Any]
    before: Any
    after: Any
    given: tuple[str, ...] = ()
    earlier: tuple[str, ...] | None = None
    terminal: bool = False
    ranks: int = 1

    def setting(self) -> tuple[Any, ...]:
        """All that decides the job without the change: rows that share it share that job."""
        return self.given, self.earlier, self.terminal, self.ranks

    def train(self, folder: str, flags: Sequence[str] = ()) -> Ran:
        """The job with `flags` on top of what is given."""
        if self.earlier is not None:
            train(folder, (*self.given, *self.earlier))
        return train(folder, (*self.given, *flags), terminal=self.terminal)


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Any()
