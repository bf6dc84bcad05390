"""N ranks against one: the same job on two layouts, compared number by number.

`trace` runs on every rank of a process group (a `RankPool`'s, usually) and records what a layout did;
`compare` says whether two layouts did the same. Jobs are built by the same `assemble` that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanish.config.load import load_config
from titanish.data.build import prepare_data
from titanish.data.loader import IGNORED_LABEL, StepBatch
from titanish.models.registry import resolve_size
from titanish.parallel.shards import unique_parameters
from titanish.runtime.device import select_device
from titanish.train.assemble import assemble, start_mesh
from titanish.train.job import Job, update


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences; 0 is bitwise.

    The defaults are for float32 sums in another order. Over ten steps Adam magnifies the rounding of
    gradients near zero, hence the looser norm.
    """

    first_loss: float = 1e-6
    first_norm: float = 1e-5
    gradient: float = 1e-5
    parameter: float = 1e-5
    loss: float = 1e-5
    norm: float = 2e-4


BITWISE = Tolerances(0, 0, 0, 0, 0, 0)


@dataclass
class Trace:
    """What training did: per step, and in the first step for every tensor (whole, on the CPU).

    `tokens` holds this rank's inputs of every step; `parameters` are those after the first step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[Tensor] = field(default_factory=list)
    batch_rank: int = 0


def build_job(flags: Sequence[str]) -> tuple[Job, int]:
    """The job that command-line `flags` describe on the running process group, and this rank's batch
    index."""
    loaded = load_config(
        None, flags, world_size=dist.get_world_size(), resolve_size=resolve_size, at_start=True
    )
    config = loaded.config
    prepared = prepare_data(
        config.training,
        config.validation,
        config.model,
        vocab_size=loaded.size.vocab_size,
        seed=config.debug.seed,
    )
    device = select_device(dist.get_rank())
    mesh = start_mesh(loaded, device)
    return assemble(loaded, prepared, device, mesh), mesh.at.batch


def trace(flags: Sequence[str], steps: int, *, tensors: bool = True, uneven: bool = True) -> Trace:
    """Train `steps` steps and record them.

    Args:
        tensors: record initial weights, gradients and parameters of the first step as well.
        uneven: leave rows with very different numbers of labels, as `uneven_labels` does.
    """
    job, batch_rank = build_job(flags)
    record = Trace(batch_rank=batch_rank)
    try:
        if tensors:
            record.initial = whole_tensors(job, lambda p: p)
        batches = iter(job.loader)
        for step in range(steps):
            batch = next(batches)
            record.tokens.append(batch["tokens"])
            _one_step(job, uneven_labels(batch) if uneven else batch, record, tensors and step == 0)
    finally:
        for hook in job.hooks:
            hook.close()
        job.loader.close()
    return record


def _one_step(job: Job, batch: StepBatch, record: Trace, tensors: bool) -> None:
    loss = job.step.run(batch).double()
    dist.all_reduce(loss, group=loss_group(job))
    if tensors:
        record.gradients = whole_tensors(job, lambda p: p.grad)
    result = update(job, loss)
    record.losses.append(loss.item())
    record.norms.append(result.grad_norm.item())
    if tensors:
        record.parameters = whole_tensors(job, lambda p: p)


def loss_group(job: Job) -> dist.ProcessGroup:
    """The ranks over which the job reports its loss."""
    return next(hook.loss_group for hook in job.hooks if hasattr(hook, "loss_group"))


def uneven_labels(batch: StepBatch) -> StepBatch:
    """Keep between one label and all of them in each row, by the row's own tokens: the same cut on any
    layout."""
    labels = batch["labels"].clone()
    seq = labels.size(1)
    kept = 1 + batch["tokens"].sum(dim=1) % seq
    labels[torch.arange(seq) >= kept.unsqueeze(1)] = IGNORED_LABEL
    return StepBatch(tokens=batch["tokens"], labels=labels)


def whole_tensors(job: Job, pick: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """What `pick` takes of every parameter, whole, by name; all ranks must take part."""
    found = {}
    for name, parameter in unique_parameters(job.model):
        tensor = pick(parameter)
        assert tensor is not None, f"{name} has no gradient"
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.detach().clone().cpu()
    return found


def compare(one: Trace, other: Trace, tolerances: Tolerances | None = None) -> list[str]:
    """Where `other` differs from `one` by more than the tolerances, in words; empty if it trained the same.

    Initial weights are compared bitwise whatever the tolerances.
    """
    t = tolerances or Tolerances()
    found = list(_tensors("initial weights", one.initial, other.initial, 0.0))
    found += _number("loss of step 1", one.losses[0], other.losses[0], t.first_loss)
    found += _number("gradient norm of step 1", one.norms[0], other.norms[0], t.first_norm)
    found += _tensors("gradient", one.gradients, other.gradients, t.gradient)
    found += _tensors("parameters after step 1", one.parameters, other.parameters, t.parameter)
    for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True), start=1):
        found += _number(f"loss of step {step}", a, b, t.loss)
    for step, (a, b) in enumerate(zip(one.norms, other.norms, strict=True), start=1):
        found += _number(f"gradient norm of step {step}", a, b, t.norm)
    return found


def whole_batches(traces: Sequence[Trace]) -> list[Tensor]:
    """The global batch of every step, put together from all ranks' traces in the order of batch ranks.

    Raises:
        AssertionError: two ranks of the same batch index read different rows.
    """
    by_rank: dict[int, list[Tensor]] = {}
    for each in traces:
        held = by_rank.setdefault(each.batch_rank, each.tokens)
        same = all(torch.equal(a, b) for a, b in zip(held, each.tokens, strict=True))
        assert same, f"two ranks with batch index {each.batch_rank} read different rows"
    return [torch.cat(parts) for parts in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]


def _number(what: str, a: float, b: float, tolerance: float) -> Iterator[str]:
    difference = abs(a - b) / max(abs(a), 1e-30)
    if not difference <= tolerance:  # so that NaN differs
        yield f"{what}: {a!r} and {b!r}, {difference:.1e} apart, allowed {tolerance:.0e}"


def _tensors(what: str, a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    if a.keys() != b.keys():
        yield f"{what}: only on one side: {sorted(a.keys() ^ b.keys())}"
    for name in a.keys() & b.keys():
        if torch.equal(a[name], b[name]):
            continue
        difference = ((a[name] - b[name]).norm() / a[name].norm().clamp(min=1e-30)).item()
        if not difference <= tolerance or tolerance == 0:
            yield f"{what} of {name}: {difference:.1e} apart, allowed {tolerance:.0e}"
