"""Saving and loading checkpoints over all ranks; a failure on one is an error on all."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titanish.checkpoint import state, store
from titanish.checkpoint.reading import (
    DamagedError,
    SafeReader,
    damage,
    first_failure,
    in_one_line,
    load_failure,
)
from titanish.checkpoint.writing import PlainWriter
from titanish.errors import CheckpointError

logger = logging.getLogger("titanish")
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far training is: what a resume needs besides tensors."""

    step: int
    tokens_seen: int
    samples_seen: int


@dataclass
class CheckpointManager:
    """The checkpoints of one job.

    Attributes:
        folder: holds `step-N` folders.
        keep_latest_k: how many complete checkpoints stay; 0 for all.
        about: stored in every manifest (model, sizes, optimizer, mesh, data, versions).
        documents: file name -> text, stored beside the tensors (the resolved config).
        attachments: folder name -> files copied into it (the tokenizer).
    """

    folder: Path
    keep_latest_k: int
    about: Mapping[str, Any]
    documents: Mapping[str, str]
    attachments: Mapping[str, Sequence[Path]]
    _last: int = field(default=-1, init=False)
    """The step that this run loaded or wrote last; complete ones above it are another run's."""
    _older: tuple[int, ...] = field(default=(), init=False)
    """What `load` may go on to if the step that `find` chose is damaged, the newest first."""

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Write the checkpoint of `progress.step`, commit it, and delete what retention gives up.

        Steps above the one that this run started from belong to the branch that it left: they are renamed
        first, so that no later resume takes them for this run's.

        Raises:
            CheckpointError: on every rank if any rank could not write; nothing older is touched then.
        """
        step = progress.step
        complete = _on_main(self._leave_branch, f"cannot write below {self.folder}")
        if step == self._last and step in complete:
            return
        partial = _on_main(lambda: store.begin(self.folder, step), f"cannot write below {self.folder}")
        tensors = state.collect(model, optimizer)
        tensors["rng"] = {f"rank{dist.get_rank()}": state.rng_to_tensor()}
        try:
            dcp.save(tensors, storage_writer=PlainWriter(partial))
        except CheckpointException as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {partial}: {_named(error)}; "
                "earlier checkpoints are untouched"
            ) from error
        final = _on_main(lambda: self._finish(step, progress), f"cannot complete {partial}")
        self._last = step
        logger.info(f"checkpoint of step {step} complete: {final}")

    def _leave_branch(self) -> tuple[int, ...]:
        """Set the steps aside that this run neither loaded nor wrote, and return those that stay."""
        complete = store.scan(self.folder).complete
        for step in complete:
            if step > self._last:
                aside = store.set_aside(self.folder, step)
                logger.warning(f"this run goes on from before step {step}: its checkpoint is now {aside}")
        return tuple(step for step in complete if step <= self._last)

    def _finish(self, step: int, progress: Progress) -> Path:
        partial = store.partial_folder(self.folder, step)
        for name, text in self.documents.items():
            (partial / name).write_text(text)
        for name, files in self.attachments.items():
            (partial / name).mkdir()
            for file in files:
                shutil.copy2(file, partial / name / file.name)
        about = {"tokens_seen": progress.tokens_seen, "samples_seen": progress.samples_seen, **self.about}
        final = store.commit(self.folder, step, about)
        for old in store.steps_to_delete(store.scan(self.folder).complete, self.keep_latest_k):
            try:
                store.delete(self.folder, old)
            except OSError as error:
                logger.warning(
                    f"the checkpoint of step {old} could not be deleted: {error.strerror or error}"
                )
            else:
                logger.info(
                    f"checkpoint of step {old} deleted (checkpoint.keep_latest_k = {self.keep_latest_k})"
                )
        return final

    def size(self, step: int) -> int:
        """Bytes of the files of one complete checkpoint."""
        files = store.step_folder(self.folder, step).rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())

    def find(self, load_step: int) -> int | None:
        """The step to resume from: `load_step`, or the newest complete one for -1; None for a fresh start.

        What cannot be used is named and skipped.

        Raises:
            CheckpointError: the folder cannot be written to, the wanted step is missing or broken, or there
                are only broken ones.
        """
        name = str(self.folder).replace("\0", "\\0")
        _on_main(lambda: store.probe(self.folder), f"checkpoint.folder: cannot write below {name}")
        found = _on_main(lambda: store.scan(self.folder), f"cannot read {self.folder}")
        if load_step != -1:
            if load_step in found.complete:
                return load_step
            path = store.step_folder(self.folder, load_step)
            why = dict(found.broken).get(path, "there is no such folder")
            have = ", ".join(map(str, found.complete)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {load_step}: {path} cannot be used: {why}; complete steps: {have}"
            )
        for path, reason in found.broken:
            logger.warning(f"skipping {path}: {reason}")
        if found.complete:
            *older, newest = found.complete
            self._older = tuple(reversed(older))
            return newest
        broken_steps = [(path, why) for path, why in found.broken if not path.name.startswith(".")]
        if broken_steps:
            raise self._all_broken(f"{path}: {reason}" for path, reason in broken_steps)
        return None

    def _all_broken(self, named: Iterable[str]) -> CheckpointError:
        return CheckpointError(
            f"no usable checkpoint in {self.folder}, only broken ones ({'; '.join(named)}); move them away "
            "to start from step 0, or set checkpoint.folder to another folder"
        )

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Read the checkpoint of `step` into model, optimizer and, where the ranks are the same, the
        generators.

        If its data is damaged and `find` chose it as the newest, the next older one is read instead, and so
        on; the result tells which it was.

        Raises:
            CheckpointError: on every rank if any rank could not read, or if the model or the optimizer is
                another one. What was read until then stays in them: they are of no use.
        """
        skipped: list[str] = []
        for candidate in (step, *self._older):
            try:
                progress = self._load(candidate, model, optimizer)
            except DamagedError as error:
                if not self._older:
                    raise
                logger.warning(f"skipping {error}")
                skipped.append(str(error))
            else:
                self._last = candidate
                return progress
        raise self._all_broken(skipped)

    def _load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        path = store.step_folder(self.folder, step)
        manifest = _on_main(lambda: store.read_manifest(path), f"{path} cannot be used")
        self._check_model(path, manifest)
        self._check_optimizer(path, manifest)
        self._compare_data(path, manifest)
        tensors = state.collect(model, optimizer)
        reader = SafeReader(path)
        sizes = _on_main(reader.sizes, f"{path} could not be read")
        self._check_names(path, manifest, tensors, sizes)
        own = f"rank{dist.get_rank()}"
        has_generators = self._has_generators(manifest, sizes)
        if has_generators:
            tensors["rng"] = {own: torch.empty(sizes[f"rng.{own}"], dtype=torch.uint8)}
        try:
            dcp.load(tensors, storage_reader=reader)
        except CheckpointException as error:
            raise load_failure(path, error) from error
        state.restore(model, optimizer, tensors)
        if has_generators:
            _on_all(lambda: state.rng_from_tensor(tensors["rng"][own]), f"{path} could not be read")
        return Progress(step, manifest["tokens_seen"], manifest["samples_seen"])

    def _has_generators(self, manifest: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> bool:
        """Whether the generators of these very ranks are in the checkpoint; the log says why if not."""
        reason = ""
        if manifest.get("mesh") != self.about.get("mesh"):
            reason = "the mesh differs from the checkpoint's"
        elif not all(_is_generator(sizes.get(f"rng.rank{rank}")) for rank in range(dist.get_world_size())):
            reason = "the checkpoint lacks those of some ranks"
        if reason:
            logger.info(f"{reason}: random number generators start from the seed")
        return not reason

    def _check_names(
        self,
        path: Path,
        manifest: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, Any]],
        sizes: Mapping[str, torch.Size],
    ) -> None:
        """Tell state that another optimizer would have kept from an index that lost a name."""
        wanted = [f"{part}.{name}" for part, named in tensors.items() for name in named]
        missing = [name for name in wanted if name not in sizes]
        if not missing:
            return
        running, saved = self.about.get("optimizer"), manifest.get("optimizer")
        kinds = sorted({name.rpartition(".")[2] for name in missing})
        if all(name.startswith("optimizer.") for name in missing) and (
            kinds == ["momentum_buffer"] or None in (running, saved)
        ):
            raise CheckpointError(
                f"{path} was saved by an optimizer that keeps no {', '.join(kinds)}, this run's "
                f"{running or 'optimizer'} does; set optimizer.name and its options back, or start "
                "from step 0"
            )
        raise DamagedError(f"{path} could not be read: its index lacks {missing[0]}")

    def _check_optimizer(self, path: Path, manifest: Mapping[str, Any]) -> None:
        saved, running = manifest.get("optimizer"), self.about.get("optimizer")
        if None not in (saved, running) and saved != running:
            raise CheckpointError(
                f"{path} was saved by the optimizer {saved}, this run uses {running}; set optimizer.name "
                "back, or start from step 0"
            )

    def _check_model(self, path: Path, manifest: Mapping[str, Any]) -> None:
        saved, running = manifest.get("model", {}), self.about["model"]
        differing = [
            f"{field} is {saved.get(field)!r} there and {value!r} here"
            for field, value in running.items()
            if saved.get(field) != value and field not in ("flavor", "max_seq_len", "init_std")
        ]
        if differing:
            raise CheckpointError(f"{path} holds another model: {'; '.join(differing)}")

    def _compare_data(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Say what makes the samples after the resume other ones than those that would have followed."""
        saved, running = manifest.get("data", {}), self.about["data"]
        for key, value in running.items():
            if saved.get(key) != value:
                logger.warning(
                    f"{path} was trained on other data: {key} was {saved.get(key)!r} and is {value!r}; "
                    "samples may be read again or left out"
                )


def _on_main(work: Callable[[], T], what: str = "") -> T:
    """Do `work` on rank 0 and give its result to all ranks; its failure is a CheckpointError on all."""
    answer: list[Any] = [None, None, False]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except Exception as error:  # whatever it is, the others wait for an answer
            reason = _reason(error)
            answer[1:] = f"{what}: {reason}" if what else reason, isinstance(error, DamagedError)
    dist.broadcast_object_list(answer, src=0)
    result, reason, damaged = answer
    if reason is not None:
        raise DamagedError(reason) if damaged else CheckpointError(reason)
    return result


def _on_all(work: Callable[[], None], what: str) -> None:
    """Do `work`, which reads what was loaded, on every rank; one that cannot is a DamagedError on all."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    own = None
    try:
        work()
    except Exception as error:
        own = damage(error)
    dist.all_gather_object(reasons, own)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise DamagedError(f"{what}: rank {rank}: {reason}")


def _is_generator(size: torch.Size | None) -> bool:
    """Whether a tensor of `size` can be a generator's bytes; a damaged index may ask for any memory."""
    return size is not None and len(size) == 1 and 0 < size[0] <= 2**24


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _named(error: CheckpointException) -> str:
    """The lowest failing rank and its cause, in one line."""
    rank, cause = first_failure(error)
    return f"rank {rank}: {type(cause).__name__}: {in_one_line(cause)}"
