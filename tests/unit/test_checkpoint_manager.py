"""What a run on one rank does with checkpoints that it finds: which it believes, sets aside or refuses."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titanish.checkpoint import store
from titanish.checkpoint.manager import CheckpointManager, Progress
from titanish.errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager(folder: Path, keep: int = 0, **about: Any) -> CheckpointManager:
    return CheckpointManager(folder, keep, {"model": {"dim": 4}, "mesh": {}, "data": {}, **about}, {}, {})


def job(value: float = 0.0, **sgd: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    if sgd:
        return model, torch.optim.SGD(model.parameters(), **sgd)
    return model, torch.optim.AdamW(model.parameters())


def write(folder: Path, *steps: int, keep: int = 0, **about: Any) -> CheckpointManager:
    """A run from step 0 whose weights are the number of the step."""
    run = manager(folder, keep, **about)
    for step in steps:
        run.save(*job(step), Progress(step, step * 10, step))
    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weight(folder: Path, step: int) -> float:
    model, optimizer = job()
    manager(folder).load(step, model, optimizer)
    return model.weight[0, 0].item()


# ------------------------------------------------------------------------------------------ abandoned steps


def test_steps_above_the_loaded_one_are_set_aside_by_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 5, 10, 15)
    run = manager(tmp_path, keep=2)
    assert run.find(5) == 5
    run.load(5, *job())
    assert names(tmp_path) == ["step-10", "step-15", "step-5"]  # nothing is touched until there is a new one
    run.save(*job(7), Progress(7, 70, 7))
    assert names(tmp_path) == ["step-5", "step-7", "superseded-10", "superseded-15"]
    assert (
        f"this run goes on from before step 10: its checkpoint is now {tmp_path}/superseded-10"
        in caplog.messages
    )
    run.save(*job(100), Progress(10, 100, 10))
    assert weight(tmp_path, 10) == 100
    assert manager(tmp_path).find(-1) == 10
    assert names(tmp_path) == ["step-10", "step-7", "superseded-10", "superseded-15"]


def test_the_loaded_step_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path, 5)
    run = manager(tmp_path)
    run.load(5, *job())
    run.save(*job(99), Progress(5, 50, 5))
    assert weight(tmp_path, 5) == 5


def test_a_step_that_this_run_neither_loaded_nor_wrote_is_set_aside_for_its_own(tmp_path: Path) -> None:
    write(tmp_path, 5)
    manager(tmp_path).save(*job(99), Progress(5, 50, 5))
    assert weight(tmp_path, 5) == 99
    assert names(tmp_path) == ["step-5", "superseded-5"]


def test_retention_keeps_the_step_just_written(tmp_path: Path) -> None:
    write(tmp_path, 5, 10)
    run = manager(tmp_path, keep=1)
    run.load(5, *job())
    run.save(*job(), Progress(6, 60, 6))
    assert names(tmp_path) == ["step-6", "superseded-10"]


# -------------------------------------------------------------------------------------------------- writing


def test_a_step_that_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write(tmp_path, 5, keep=1)
    with patch.object(store, "_remove", side_effect=shutil.Error("in use")):
        run.save(*job(), Progress(6, 60, 6))
    assert store.scan(tmp_path).complete == (6,)
    assert "the checkpoint of step 5 could not be deleted: in use" in caplog.messages
    run.save(*job(), Progress(7, 70, 7))
    assert names(tmp_path) == ["step-7"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (shutil.Error("cannot copy"), "cannot copy"),
        (OSError("no number"), "no number"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "No space left on device", "/a"), "No space left on device: /a"),
        (ValueError("odd"), "odd"),
        (KeyError(), "KeyError"),
    ],
    ids=repr,
)
def test_whatever_fails_in_completing_is_named(tmp_path: Path, error: Exception, text: str) -> None:
    with patch.object(store, "commit", side_effect=error), pytest.raises(CheckpointError) as caught:
        write(tmp_path, 5)
    assert str(caught.value) == f"cannot complete {tmp_path}/.partial-step-5: {text}"


# ------------------------------------------------------------------------------------------------ the folder


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text("x"), "it is not a folder"),
        (lambda path: path.symlink_to("nothing"), "it is a link to nothing"),
    ],
    ids=["file", "dangling link"],
)
def test_a_folder_that_is_none_is_refused_at_the_start(tmp_path: Path, make: Any, reason: str) -> None:
    make(tmp_path / "saves")
    with pytest.raises(CheckpointError) as caught:
        manager(tmp_path / "saves").find(-1)
    assert str(caught.value) == f"checkpoint.folder: cannot write below {tmp_path}/saves: {reason}"


def test_a_folder_that_the_system_refuses_is_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        manager(Path("/proc/nope")).find(-1)
    assert str(caught.value).startswith(
        "checkpoint.folder: cannot write below /proc/nope: No such file or dir"
    )


def test_a_read_only_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    error = OSError(30, "Read-only file system")
    with (
        patch("tempfile.NamedTemporaryFile", side_effect=error),
        pytest.raises(CheckpointError) as caught,
    ):
        manager(tmp_path).find(-1)
    assert str(caught.value) == f"checkpoint.folder: cannot write below {tmp_path}: Read-only file system"


def test_a_name_with_nul_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        manager(tmp_path / "a\0b").find(-1)
    assert str(caught.value) == (
        f"checkpoint.folder: cannot write below {tmp_path}/a\\0b: the name holds a NUL character"
    )


# -------------------------------------------------------------------------------------------------- loading


def scramble(path: Path) -> None:
    """The same size, other content."""
    path.write_bytes(b"\x80" * path.stat().st_size)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_damaged_content_is_skipped_for_the_next_older_step(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1, 2, 3)
    for step in (2, 3):
        scramble(tmp_path / f"step-{step}" / file)
    run, (model, optimizer) = manager(tmp_path), job()
    assert run.find(-1) == 3
    assert run.load(3, model, optimizer) == Progress(1, 10, 1)
    assert model.weight.unique().tolist() == [1]
    skips = [text for text in caplog.messages if text.startswith("skipping ")]
    assert [text.partition(" could not")[0] for text in skips] == [
        f"skipping {tmp_path}/step-{step}" for step in (3, 2)
    ]
    assert all("its data is damaged (" in text and "weights_only" not in text for text in skips)
    run.save(*job(), Progress(2, 20, 2))
    assert names(tmp_path) == ["step-1", "step-2", "superseded-2", "superseded-3"]


def test_damaged_content_alone_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for step in (1, 2):
        scramble(tmp_path / f"step-{step}" / "__0_0.distcp")
    run = manager(tmp_path)
    assert run.find(-1) == 2
    with pytest.raises(CheckpointError) as caught:
        run.load(2, *job())
    message = str(caught.value)
    assert message.startswith(
        f"no usable checkpoint in {tmp_path}, only broken ones ({tmp_path}/step-2 could "
    )
    assert f"; {tmp_path}/step-1 could not be read: rank 0: its data is damaged (" in message


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_wanted_step_with_damaged_content_is_an_error(tmp_path: Path, file: str) -> None:
    write(tmp_path, 1, 2)
    scramble(tmp_path / "step-2" / file)
    run = manager(tmp_path)
    assert run.find(2) == 2
    with pytest.raises(CheckpointError, match=r"step-2 could not be read: .*its data is damaged \(\w+\)$"):
        run.load(2, *job())


def change_index(path: Path, change: Any) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def test_an_index_without_a_weight_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    change_index(tmp_path / "step-1", lambda index: index.state_dict_metadata.pop("model.weight"))
    with pytest.raises(CheckpointError, match=r"step-1 could not be read: its index lacks model\.weight$"):
        manager(tmp_path).load(1, *job())


def test_an_index_without_names_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    change_index(tmp_path / "step-1", lambda index: setattr(index, "state_dict_metadata", 3))
    with pytest.raises(CheckpointError, match=r"its data is damaged \(AttributeError\)$"):
        manager(tmp_path).load(1, *job())


def test_missing_generators_start_from_the_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    change_index(tmp_path / "step-1", lambda index: index.state_dict_metadata.pop("rng.rank0"))
    model, optimizer = job()
    torch.manual_seed(3)
    with caplog.at_level("INFO", "titanish"):
        assert manager(tmp_path).load(1, model, optimizer).step == 1
    assert torch.initial_seed() == 3
    expected = "the checkpoint lacks those of some ranks: random number generators start from the seed"
    assert expected in caplog.messages


def test_generators_that_are_none_are_damage(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (
        patch("titanish.checkpoint.state.set_rng_state", side_effect=KeyError("torch")),
        pytest.raises(CheckpointError) as caught,
    ):
        manager(tmp_path).load(1, *job())
    assert str(caught.value) == (
        f"{tmp_path}/step-1 could not be read: rank 0: its data is damaged (KeyError)"
    )


def test_an_index_that_names_a_function_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / "step-2" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"TensorProperties", b"tensorProperties"))
    run = manager(tmp_path)
    assert run.find(-1) == 2
    assert run.load(2, *job()).step == 1
    assert (
        f"skipping {tmp_path}/step-2 could not be read: its .metadata names "
        "torch.distributed.checkpoint.metadata.tensorProperties, which has no place in a checkpoint's index"
    ) in caplog.messages


def test_a_load_that_runs_out_of_memory_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    run = manager(tmp_path)
    assert run.find(-1) == 2
    with (
        patch("titanish.checkpoint.reading.SafeReader.read_data", side_effect=MemoryError("too much")),
        pytest.raises(CheckpointError) as caught,
    ):
        run.load(2, *job())
    assert str(caught.value) == f"{tmp_path}/step-2 could not be read: rank 0: MemoryError: too much"


# -------------------------------------------------------------------------------------------- the optimizer


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, optimizer="AdamW")
    assert json.loads((tmp_path / "step-1" / "titanish.json").read_text())["optimizer"] == "AdamW"
    with pytest.raises(CheckpointError) as caught:
        manager(tmp_path, optimizer="SGD").load(1, *job(lr=0.1))
    assert str(caught.value) == (
        f"{tmp_path}/step-1 was saved by the optimizer AdamW, this run uses SGD; set optimizer.name back, or "
        "start from step 0"
    )


@pytest.mark.parametrize(("saved", "running"), [("AdamW", None), (None, "AdamW"), ("AdamW", "AdamW")])
def test_an_optimizer_that_is_not_named_is_taken_for_the_same(
    tmp_path: Path, saved: str | None, running: str | None
) -> None:
    there: dict[str, Any] = {"optimizer": saved} if saved else {}
    here: dict[str, Any] = {"optimizer": running} if running else {}
    write(tmp_path, 1, **there)
    run = manager(tmp_path, **here)
    assert run.load(1, *job()).step == 1


@pytest.mark.parametrize("name", ["SGD", None])
def test_momentum_that_was_not_saved_is_refused(tmp_path: Path, name: str | None) -> None:
    about: dict[str, Any] = {"optimizer": name} if name else {}
    manager(tmp_path, **about).save(*job(lr=0.1), Progress(1, 10, 1))
    with pytest.raises(CheckpointError) as caught:
        manager(tmp_path, **about).load(1, *job(lr=0.1, momentum=0.9))
    assert str(caught.value) == (
        f"{tmp_path}/step-1 was saved by an optimizer that keeps no momentum_buffer, this run's "
        f"{name or 'optimizer'} does; set optimizer.name and its options back, or start from step 0"
    )
