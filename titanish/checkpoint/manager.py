"""Saving and loading checkpoints over all ranks; a failure on one is an error on all."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanish.checkpoint import state, store
from titanish.checkpoint.reading import SafeReader
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


@dataclass(frozen=True)
class CheckpointManager:
    """The checkpoints of one job.

    Attributes:
        folder: holds `step-N` folders.
        keep_latest_k: how many complete checkpoints stay; 0 for all.
        about: stored in every manifest (model, sizes, mesh, data, versions).
        documents: file name -> text, stored beside the tensors (the resolved config).
        attachments: folder name -> files copied into it (the tokenizer).
    """

    folder: Path
    keep_latest_k: int
    about: Mapping[str, Any]
    documents: Mapping[str, str]
    attachments: Mapping[str, Sequence[Path]]

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Write the checkpoint of `progress.step`, commit it, and delete what retention gives up.

        Raises:
            CheckpointError: on every rank if any rank could not write; nothing older is touched then.
        """
        step = progress.step
        if step in _on_main(lambda: store.scan(self.folder).complete):
            return
        partial = _on_main(lambda: store.begin(self.folder, step), f"cannot write below {self.folder}")
        tensors = state.collect(model, optimizer)
        tensors["rng"] = {f"rank{dist.get_rank()}": state.rng_to_tensor()}
        try:
            dcp.save(tensors, storage_writer=PlainWriter(partial))
        except CheckpointException as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {partial}: {_first_failure(error)}; "
                "earlier checkpoints are untouched"
            ) from error
        final = _on_main(lambda: self._finish(step, progress), f"cannot complete {partial}")
        logger.info(f"checkpoint of step {step} complete: {final}")

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
            store.delete(self.folder, old)
        return final

    def find(self, load_step: int) -> int | None:
        """The step to resume from: `load_step`, or the newest complete one for -1; None for a fresh start.

        What cannot be used is named and skipped.

        Raises:
            CheckpointError: the wanted step is missing or broken, or there are only broken ones.
        """
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
            return found.complete[-1]
        broken_steps = [(path, why) for path, why in found.broken if not path.name.startswith(".")]
        if broken_steps:
            named = "; ".join(f"{path}: {reason}" for path, reason in broken_steps)
            raise CheckpointError(
                f"no usable checkpoint in {self.folder}, only broken ones ({named}); move them away to start "
                "from step 0, or set checkpoint.folder to another folder"
            )
        return None

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Read the checkpoint of `step` into model, optimizer and, where the ranks are the same, the
        generators.

        Raises:
            CheckpointError: on every rank if any rank could not read, or if the model is another one.
        """
        path = store.step_folder(self.folder, step)
        manifest = _on_main(lambda: store.read_manifest(path), f"{path} cannot be used")
        self._check_model(path, manifest)
        self._compare_data(path, manifest)
        tensors = state.collect(model, optimizer)
        same_ranks = manifest.get("mesh") == self.about.get("mesh")
        own = f"rank{dist.get_rank()}"
        reader = SafeReader(path)
        if same_ranks:
            sizes = _on_main(lambda: _tensor_sizes(reader, "rng."), f"{path} could not be read")
            tensors["rng"] = {own: torch.empty(sizes[f"rng.{own}"], dtype=torch.uint8)}
        try:
            dcp.load(tensors, storage_reader=reader)
        except CheckpointException as error:
            raise CheckpointError(f"{path} could not be read: {_first_failure(error)}") from error
        state.restore(model, optimizer, tensors)
        if same_ranks:
            state.rng_from_tensor(tensors["rng"][own])
        else:
            logger.info(
                "the mesh differs from the checkpoint's: random number generators start from the seed"
            )
        return Progress(step, manifest["tokens_seen"], manifest["samples_seen"])

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
        for field, value in running.items():
            if saved.get(field) != value:
                logger.warning(
                    f"{path} was trained on other data: {field} was {saved.get(field)!r} and is {value!r}; "
                    "samples may be read again or left out"
                )


def _on_main(work: Callable[[], T], what: str = "") -> T:
    """Do `work` on rank 0 and give its result to all ranks; its failure is a CheckpointError on all."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except (OSError, CheckpointError) as error:
            reason = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            answer[1] = f"{what}: {reason}" if what else reason
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    return answer[0]


def _tensor_sizes(reader: SafeReader, prefix: str) -> dict[str, torch.Size]:
    entries = reader.read_metadata().state_dict_metadata
    return {
        name: entry.size
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _first_failure(error: CheckpointException) -> str:
    """The lowest failing rank and its cause, in one line."""
    rank, (cause, _) = min(error.failures.items())
    text = " ".join(str(cause).split()) or type(cause).__name__
    return f"rank {rank}: {type(cause).__name__}: {text}"
