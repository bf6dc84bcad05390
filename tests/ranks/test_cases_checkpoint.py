"""Checkpoints over ranks: any mesh loads another's bits, a failing rank fails all, nothing older is lost."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.ranks.layouts import JOB, LAYOUTS, Layout
from titanish.checkpoint.manager import CheckpointManager, Progress
from titanish.errors import CheckpointError
from titanish.parallel.shards import unique_parameters
from titanish.testing.equality import build_job, whole_tensors
from titanish.testing.ranks import RankPool
from titanish.train.job import Job, run

Pool = Callable[[int], RankPool]
MESHES = {"one": Layout(), **LAYOUTS}


def command(name: str, folder: Path, steps: int, *more: str) -> tuple[str, ...]:
    """A job on the mesh `name` that saves every step below `folder`."""
    return (
        *JOB,
        *MESHES[name].command_line(),
        f"--training.steps={steps}",
        "--lr_scheduler.total_steps=10",
        "--checkpoint.enable",
        "--checkpoint.interval=1",
        f"--job.dump_folder={folder}",
        *more,
    )


def state_of(job: Job) -> dict[str, Tensor]:
    """Every weight and everything that the optimizer keeps of it, whole."""
    found = whole_tensors(job, lambda p: p)
    for name, parameter in unique_parameters(job.model):
        for key, value in job.optimizer.state[parameter].items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}:{key}"] = whole.clone()
    return found


def train(flags: tuple[str, ...]) -> dict[str, Tensor]:
    """The state at the end of a run."""
    job, _ = build_job(flags)
    run(job)
    return state_of(job)


def resumed(flags: tuple[str, ...]) -> tuple[tuple[int, int, int], dict[str, Tensor]]:
    """Where a job stands when it is built, before its first step."""
    job, _ = build_job(flags)
    job.loader.close()
    for hook in job.hooks:
        hook.close()
    return (job.state.step, job.state.samples_seen, job.state.tokens_seen), state_of(job)


@pytest.fixture(scope="module")
def three_steps(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with the checkpoints of three steps on fsdp2, vocabulary 257, and the state at the end."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, pool(2).run(train, command("fsdp2", folder, 3))[0]


@pytest.mark.parametrize("name", ["one", "fsdp2", "fsdp4", "tp2", "fsdp2-tp2", "ddp2"])
def test_every_mesh_loads_the_bits_that_another_saved(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], name: str
) -> None:
    folder, saved = three_steps
    for counts, state in pool(MESHES[name].world_size).run(resumed, command(name, folder, 3)):
        assert counts == (3, 3 * 12, 3 * 12 * 33)
        assert state.keys() == saved.keys()
        assert {key.partition(":")[2] for key in state} == {"", "exp_avg", "exp_avg_sq", "step"}
        assert [key for key in saved if not torch.equal(saved[key], state[key])] == []


def test_saving_changes_nothing(
    pool: Pool, tmp_path: Path, three_steps: tuple[Path, dict[str, Tensor]]
) -> None:
    unsaved = pool(2).run(train, command("fsdp2", tmp_path, 3, "--no-checkpoint.enable"))[0]
    assert [key for key, tensor in three_steps[1].items() if not torch.equal(tensor, unsaved[key])] == []
    assert not (tmp_path / "checkpoint").exists()


def test_load_step_chooses_an_older_one(pool: Pool, three_steps: tuple[Path, dict[str, Tensor]]) -> None:
    flags = command("fsdp2", three_steps[0], 3, "--checkpoint.load_step=2")
    assert [counts[0] for counts, _ in pool(2).run(resumed, flags)] == [2, 2]


def numbers_after(flags: tuple[str, ...], steps: bool) -> list[float]:
    """What this rank's generator gives after a run, or after resuming where it ended."""
    job, _ = build_job(flags)
    if steps:
        torch.rand(5)  # as dropout would
        run(job)
    return torch.rand(3).tolist()


def test_random_numbers_go_on_where_they_were_on_the_same_mesh_alone(pool: Pool, tmp_path: Path) -> None:
    went_on = pool(2).run(numbers_after, command("fsdp2", tmp_path, 1), True)
    assert went_on[0] != went_on[1]  # ranks that read different data draw different numbers
    assert pool(2).run(numbers_after, command("fsdp2", tmp_path, 1), False) == went_on
    fresh = pool(2).run(numbers_after, command("tp2", tmp_path, 1), False)
    assert fresh[0] == fresh[1]  # replicated activations drop out alike
    assert fresh[0] not in went_on


# ------------------------------------------------------------------------------------------- what goes wrong


def refusal(flags: tuple[str, ...]) -> str:
    """The error that building the job ends with."""
    try:
        build_job(flags)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_step_that_is_not_there_names_those_that_are(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]]
) -> None:
    folder = three_steps[0]
    flags = command("fsdp2", folder, 3, "--checkpoint.load_step=7")
    expected = (
        f"checkpoint.load_step = 7: {folder}/checkpoint/step-7 cannot be used: there is no such folder; "
        "complete steps: 1, 2, 3"
    )
    assert pool(2).run(refusal, flags) == [expected] * 2


def test_another_model_names_the_fields_and_both_values(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]]
) -> None:
    folder = three_steps[0]
    flags = command("fsdp2", folder, 3, "--model.override.n_layers=3", "--model.override.rope_theta=5e5")
    expected = (
        f"{folder}/checkpoint/step-3 holds another model: n_layers is 2 there and 3 here; "
        "rope_theta is 10000.0 there and 500000.0 here"
    )
    assert pool(2).run(refusal, flags) == [expected] * 2


def copy_of(three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """The three checkpoints again, to be damaged."""
    source, target = three_steps[0] / "checkpoint", tmp_path / "checkpoint"
    shutil.copytree(source, target)
    return target


def damage(folder: Path, steps: Sequence[int]) -> None:
    """The first of `steps` loses its index, the others a part of their tensors."""
    (folder / f"step-{steps[0]}" / ".metadata").unlink()
    for step in steps[1:]:
        path = folder / f"step-{step}" / "__1_0.distcp"
        os.truncate(path, path.stat().st_size - 1)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


def resumed_with_warnings(flags: tuple[str, ...]) -> tuple[int, list[str]]:
    handler = Lines()
    logging.getLogger("titanish").addHandler(handler)
    try:
        (step, _, _), _ = resumed(flags)
    finally:
        logging.getLogger("titanish").removeHandler(handler)
    return step, handler.lines


def test_broken_newest_checkpoints_are_named_and_an_older_one_is_resumed(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = copy_of(three_steps, tmp_path)
    damage(folder, [2, 3])
    (folder / "step-abc").write_text("stray")
    size = (folder / "step-3" / "__1_0.distcp").stat().st_size
    for step, warnings in pool(2).run(resumed_with_warnings, command("fsdp2", tmp_path, 3)):
        assert step == 1
        assert warnings == [
            f"skipping {folder}/step-2: .metadata is missing",
            f"skipping {folder}/step-3: __1_0.distcp has {size} bytes instead of {size + 1}",
            f"skipping {folder}/step-abc: not a checkpoint: the name must be step-N, a folder",
        ]


def test_only_broken_checkpoints_are_an_error_that_names_them(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = copy_of(three_steps, tmp_path)
    damage(folder, [1, 2, 3])
    for message in pool(2).run(refusal, command("fsdp2", tmp_path, 3)):
        assert message.startswith(
            f"no usable checkpoint in {folder}, only broken ones ({folder}/step-1: .metadata is missing; "
        )
        assert message.endswith(
            "); move them away to start from step 0, or set checkpoint.folder to another folder"
        )


def test_a_run_interrupted_in_its_first_save_starts_afresh(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / ".partial-step-1").mkdir(parents=True)
    step, warnings = pool(1).run(resumed_with_warnings, command("one", tmp_path, 3))[0]
    assert step == 0
    assert warnings == [f"skipping {tmp_path}/checkpoint/.partial-step-1: its save was interrupted"]


def damaged_tensors(flags: tuple[str, ...], folder: str) -> str:
    """What `load` says of a checkpoint that `find` had no reason to skip."""
    job, _ = build_job(flags)
    manager = manager_of(job)
    assert manager.find(3) == 3
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "step-3" / "__1_0.distcp").unlink()
    dist.barrier()
    try:
        manager.load(3, job.model, job.optimizer)
    except CheckpointError as error:
        return str(error)
    return "no error"


def manager_of(job: Job) -> CheckpointManager:
    return next(hook.manager for hook in job.hooks if hasattr(hook, "manager"))


def test_tensors_that_cannot_be_read_are_an_error_on_all_ranks(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = copy_of(three_steps, tmp_path)
    for message in pool(2).run(damaged_tensors, command("fsdp2", tmp_path, 3), str(folder)):
        assert message.startswith(f"{folder}/step-3 could not be read: rank ")
        assert "__1_0.distcp" in message


def test_damaged_content_of_one_rank_makes_all_resume_the_next_older_step(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = copy_of(three_steps, tmp_path)
    for path in (folder / "step-3" / "__1_0.distcp", folder / "step-2" / ".metadata"):
        path.write_bytes(b"\x80" * path.stat().st_size)
    for step, warnings in pool(2).run(resumed_with_warnings, command("fsdp2", tmp_path, 3)):
        assert step == 1
        assert [text.partition(" (")[0] for text in warnings] == [
            f"skipping {folder}/step-3 could not be read: rank 0: its data is damaged",
            f"skipping {folder}/step-2 could not be read: {folder}/step-2/.metadata cannot be read: its data "
            "is damaged",
        ]


def test_the_steps_of_a_branch_that_was_left_are_not_resumed(
    pool: Pool, three_steps: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = copy_of(three_steps, tmp_path)
    pool(2).run(train, command("fsdp2", tmp_path, 2, "--checkpoint.load_step=1"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-1",
        "step-2",
        "superseded-2",
        "superseded-3",
    ]
    assert [counts[0] for counts, _ in pool(2).run(resumed, command("fsdp2", tmp_path, 2))] == [2, 2]


def failing_leave(flags: tuple[str, ...]) -> str:
    """The error that a failure of the first rank alone, which is no system's error, ends with on this one."""
    job, _ = build_job(flags)
    job.loader.close()
    manager = manager_of(job)
    manager.folder = None  # type: ignore[assignment]
    try:
        manager.save(job.model, job.optimizer, Progress(1, 1, 1))
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_any_failure_of_the_first_rank_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    messages = pool(2).run(failing_leave, command("fsdp2", tmp_path, 1))
    assert messages == ["cannot write below None: 'NoneType' object has no attribute 'is_dir'"] * 2


# ------------------------------------------------------------------------------------------------ a full disk


def train_until_the_disk_is_full(flags: tuple[str, ...], full_on: int) -> str:
    """Runs the job; before the save of step 2 rank `full_on` can write files of at most 4096 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails as on a full disk
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    job, _ = build_job(flags)
    manager, save = manager_of(job), CheckpointManager.save

    def limited_save(self: CheckpointManager, model: Any, optimizer: Any, progress: Any) -> None:
        if progress.step == 2 and dist.get_rank() == full_on:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        save(self, model, optimizer, progress)

    assert manager.keep_latest_k == 1
    CheckpointManager.save = limited_save  # type: ignore[method-assign]
    try:
        run(job)
    except CheckpointError as error:
        return str(error)
    finally:
        CheckpointManager.save = save  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_older_checkpoint_stays(
    pool: Pool, tmp_path: Path, full_on: int
) -> None:
    flags = command("fsdp2", tmp_path, 2, "--checkpoint.keep_latest_k=1")
    folder = tmp_path / "checkpoint"
    for message in pool(2).run(train_until_the_disk_is_full, flags, full_on):
        assert message.startswith(
            f"the checkpoint of step 2 could not be written to {folder}/.partial-step-2: rank {full_on}: "
        )
        assert "File too large" in message
        assert message.endswith("; earlier checkpoints are untouched")
    assert sorted(path.name for path in folder.iterdir()) == [".partial-step-2", "step-1"]
    assert [counts[0] for counts, _ in pool(2).run(resumed, flags)] == [1, 1]


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks_at_the_start(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").write_text("a file stands in the way")
    messages = pool(2).run(refusal, command("fsdp2", tmp_path, 1))
    assert (
        messages == [f"checkpoint.folder: cannot write below {tmp_path}/checkpoint: it is not a folder"] * 2
    )


def test_the_newest_are_kept_and_hold_what_a_reader_needs(pool: Pool, tmp_path: Path) -> None:
    pool(1).run(train, command("one", tmp_path, 3, "--checkpoint.keep_latest_k=2"))
    folder = tmp_path / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    manifest = json.loads((folder / "step-3" / "titanish.json").read_text())
    assert manifest["tokens_seen"] == 3 * 12 * 33
    assert manifest["samples_seen"] == 3 * 12
    assert (manifest["model"]["name"], manifest["model"]["vocab_size"]) == ("llama3", 257)
    assert manifest["mesh"]["tp"] == 1
    assert manifest["versions"]["torch"] == torch.__version__
    assert "seq_len = 33" in (folder / "step-3" / "config.toml").read_text()
