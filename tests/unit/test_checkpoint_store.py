"""Checkpoint folders: what is complete, how one is committed, and what retention takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from titanish.checkpoint import store
from titanish.errors import CheckpointError


def write(folder: Path, step: int, **about: object) -> Path:
    """A complete checkpoint of `step` with two files in it."""
    partial = store.begin(folder, step)
    (partial / "tokenizer").mkdir()
    (partial / "tokenizer" / "vocab.txt").write_text("abc")
    (partial / "__0_0.distcp").write_bytes(b"x" * 100)
    (partial / ".metadata").write_bytes(b"index")
    return store.commit(folder, step, {"tokens_seen": 5, "samples_seen": 1, **about})


def reasons(folder: Path) -> dict[str, str]:
    return {path.name: why for path, why in store.scan(folder).broken}


def test_names_are_step_and_number(tmp_path: Path) -> None:
    assert store.step_folder(tmp_path, 500) == tmp_path / "step-500"
    assert write(tmp_path, 500) == tmp_path / "step-500"
    assert store.partial_folder(tmp_path, 7).name.startswith(".")


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert store.scan(tmp_path / "none") == store.Scan((), ())


def test_complete_steps_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        write(tmp_path, step)
    (tmp_path / "notes.txt").write_text("mine")
    assert store.scan(tmp_path) == store.Scan((3, 20, 100), ())


def test_the_manifest_holds_what_was_said_about_it_and_every_files_size(tmp_path: Path) -> None:
    path = write(tmp_path, 10, model={"dim": 64})
    assert store.read_manifest(path) == {
        "format": 1,
        "step": 10,
        "tokens_seen": 5,
        "samples_seen": 1,
        "model": {"dim": 64},
        "files": {".metadata": 5, "__0_0.distcp": 100, "tokenizer/vocab.txt": 3},
    }


def test_what_is_broken_is_named_with_its_reason(tmp_path: Path) -> None:
    for step in range(10, 100, 10):
        write(tmp_path, step)
    (tmp_path / "step-20" / ".metadata").unlink()
    os.truncate(tmp_path / "step-30" / "__0_0.distcp", 60)
    (tmp_path / "step-40" / "titanish.json").unlink()
    (tmp_path / "step-50" / "titanish.json").write_text('{"format": 1, "fil')
    (tmp_path / "step-60" / "titanish.json").write_text('{"format": 2, "files": {}}')
    (tmp_path / "step-70" / "titanish.json").write_text("[1, 2]")
    (tmp_path / "step-80" / "titanish.json").write_text('{"format": 1, "files": []}')
    (tmp_path / "step-abc").write_text("stray")
    (tmp_path / "step-007").mkdir()
    (tmp_path / "step-91").write_text("a file")
    (tmp_path / ".partial-step-95").mkdir()
    assert store.scan(tmp_path).complete == (10, 90)
    assert reasons(tmp_path) == {
        "step-20": ".metadata is missing",
        "step-30": "__0_0.distcp has 60 bytes instead of 100",
        "step-40": "titanish.json is missing",
        "step-50": "titanish.json is damaged",
        "step-60": "it has format 2, this version reads format 1",
        "step-70": "titanish.json is damaged",
        "step-80": "titanish.json is damaged",
        "step-abc": "not a checkpoint: the name must be step-N, a folder",
        "step-007": "not a checkpoint: the name must be step-N, a folder",
        "step-91": "not a checkpoint: the name must be step-N, a folder",
        ".partial-step-95": "its save was interrupted",
    }


def test_a_manifest_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    (path / "titanish.json").unlink()
    (path / "titanish.json").mkdir()
    with pytest.raises(CheckpointError, match=r"^titanish\.json cannot be read: Is a directory$"):
        store.read_manifest(path)


def test_beginning_clears_what_interrupted_saves_left(tmp_path: Path) -> None:
    (store.begin(tmp_path, 5) / "half").write_text("x")
    partial = store.begin(tmp_path, 6)
    assert list(tmp_path.iterdir()) == [partial]
    assert list(partial.iterdir()) == []


class Stop(Exception):
    """What ends a commit in the middle."""


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5])
def test_a_commit_that_fails_before_the_rename_leaves_no_step(tmp_path: Path, at: int) -> None:
    # Flushed before the rename: three files, the manifest, a folder in it, and the folder itself.
    write(tmp_path, 10)
    calls = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at + 1:
            raise Stop
        real(descriptor)

    with patch.object(os, "fsync", fsync), pytest.raises(Stop):
        write(tmp_path, 20)
    assert store.scan(tmp_path).complete == (10,)
    assert not (tmp_path / "step-20").exists()
    assert reasons(tmp_path) == {".partial-step-20": "its save was interrupted"}
    write(tmp_path, 20)
    assert store.scan(tmp_path) == store.Scan((10, 20), ())


def test_everything_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path: Path) -> None:
    events: list[str] = []
    real_flush, real_replace = store._flush, os.replace

    def flush(path: Path) -> None:
        events.append(path.name)
        real_flush(path)

    def replace(source: Path, target: Path) -> None:
        events.append(f"-> {Path(target).name}")
        real_replace(source, target)

    with patch.object(store, "_flush", flush), patch.object(os, "replace", replace):
        write(tmp_path, 20)
    assert sorted(events[:6]) == sorted(
        [".metadata", "__0_0.distcp", "vocab.txt", "titanish.json", "tokenizer", ".partial-step-20"]
    )
    assert events[6:] == ["-> step-20", tmp_path.name]


def test_a_broken_step_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    (write(tmp_path, 10) / ".metadata").unlink()
    write(tmp_path, 10)
    assert store.scan(tmp_path) == store.Scan((10,), ())
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_deleting_takes_the_name_away_before_the_files(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    with patch("shutil.rmtree", side_effect=Stop), pytest.raises(Stop):
        store.delete(tmp_path, 10)
    assert store.scan(tmp_path).complete == (20,)
    store.delete(tmp_path, 20)
    assert not (tmp_path / "step-20").exists()
    store.begin(tmp_path, 30)
    assert [path.name for path in tmp_path.iterdir()] == [".partial-step-30"]


@pytest.mark.parametrize(
    ("keep", "deleted"),
    [(0, ()), (1, (5, 10, 20)), (2, (5, 10)), (3, (5,)), (4, ()), (9, ())],
)
def test_retention_keeps_the_newest(keep: int, deleted: tuple[int, ...]) -> None:
    assert store.steps_to_delete([20, 5, 100, 10], keep) == deleted


def test_the_manifest_is_readable_json(tmp_path: Path) -> None:
    text = (write(tmp_path, 10, versions={"torch": "2.13.0"}) / "titanish.json").read_text()
    assert json.loads(text)["versions"] == {"torch": "2.13.0"}
    assert len(text.splitlines()) > 5


MANIFEST = {"format": 1, "step": 10, "tokens_seen": 0, "samples_seen": 0, "files": {".metadata": 5}}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "1"},
        {"format": True},
        {"format": None},
        {"step": 11},
        {"step": "10"},
        {"tokens_seen": -1},
        {"samples_seen": 1.5},
        {"samples_seen": None},
        {"model": []},
        {"mesh": "x"},
        {"data": 3},
        {"optimizer": 3},
        {"files": None},
        {"files": {}},
        {"files": {".metadata": "5"}},
        {"files": {".metadata": -5}},
        {"files": {".metadata": 5, "../other": 1}},
        {"files": {".metadata": 5, "a/../../other": 1}},
        {"files": {".metadata": 5, "/etc/passwd": 1}},
        {"files": {".metadata": 5, "a\0b": 1}},
        {"files": {".metadata": 5, "": 1}},
        {"files": {".metadata": 5, "\ud800": 1}},
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_damaged(tmp_path: Path, change: dict[str, object]) -> None:
    path = write(tmp_path, 10)
    (path / "titanish.json").write_text(json.dumps(MANIFEST))
    assert store.flaw(path) is None
    (path / "titanish.json").write_text(json.dumps({**MANIFEST, **change}))
    assert store.flaw(path) == "titanish.json is damaged"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe", b"null", b'"step"'], ids=["deep", "bytes", "null", "text"]
)
def test_a_manifest_that_is_none_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, 10)
    (path / "titanish.json").write_bytes(content)
    assert store.flaw(path) == "titanish.json is damaged"


def test_leftovers_that_are_links_or_files_are_removed_and_what_they_point_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("x")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".partial-step-1").symlink_to(outside)
    (folder / ".partial-step-2").write_text("a file")
    (folder / ".partial-step-3").symlink_to(tmp_path / "nothing")
    write(folder, 4)
    assert [path.name for path in folder.iterdir()] == ["step-4"]
    os.rename(folder / "step-4", outside / "step-4")
    (folder / "step-4").symlink_to(outside / "step-4")
    store.delete(folder, 4)
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in outside.iterdir()) == ["mine", "step-4"]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_stands_in_a_steps_place_is_replaced(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "step-10").write_text("x")
    else:
        (tmp_path / "step-10").symlink_to(tmp_path / "nothing")
    write(tmp_path, 10)
    assert store.scan(tmp_path) == store.Scan((10,), ())


def test_a_leftover_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".partial-step-5").mkdir()
    with patch("shutil.rmtree", side_effect=OSError(13, "Permission denied")):
        write(tmp_path, 10)
    assert store.scan(tmp_path).complete == (10,)
    assert f"{tmp_path}/.partial-step-5 could not be removed: Permission denied" in caplog.messages


def test_a_step_set_aside_gets_a_name_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        write(tmp_path, 10)
        names.append(store.set_aside(tmp_path, 10).name)
    assert names == ["superseded-10", "superseded-10-2", "superseded-10-3"]
    assert store.scan(tmp_path) == store.Scan((), ())


def test_probing_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    store.probe(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_never_takes_the_newest(keep: int) -> None:
    assert 30 not in store.steps_to_delete([30, 10, 20], keep)
