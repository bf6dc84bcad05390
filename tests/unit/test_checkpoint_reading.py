"""A checkpoint's index is a pickle: it may name what an index is made of, and nothing is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from titanish.checkpoint.reading import SafeReader
from titanish.errors import CheckpointError

# Saving needs no process group here, which torch remarks on.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Call:
    """Unpickles as `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, Any]:
        return self.call


def saved(folder: Path) -> dict[str, torch.Tensor]:
    state = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.arange(3, dtype=torch.bfloat16),
        "c": torch.tensor([1], dtype=torch.uint8),
    }
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return state


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    state = saved(tmp_path)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(loaded, storage_reader=SafeReader(tmp_path), no_dist=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("depth", ["outside", "inside"])
def test_an_index_that_names_a_function_is_refused_and_does_not_run_it(tmp_path: Path, depth: str) -> None:
    target = tmp_path / "made-by-the-pickle"
    evil: Any = Call(os.system, f"touch {target}")
    if depth == "inside":
        evil = Metadata({}, planner_data=evil)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError) as caught:
        SafeReader(tmp_path).read_metadata()
    assert str(caught.value) == (
        f"its .metadata names {os.system.__module__}.system, which has no place in a checkpoint's index"
    )
    assert not target.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())  # the plain way does run it: the attack is real
    assert target.exists()


@pytest.mark.parametrize("function", [eval, torch.load, torch.hub.load, getattr, pickle.loads])
def test_no_other_function_may_be_named(tmp_path: Path, function: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(function, "x")))
    with pytest.raises(CheckpointError, match="which has no place in a checkpoint's index"):
        SafeReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read: its data is damaged (EOFError)"),
        (b"no pickle", "cannot be read: its data is damaged (UnpicklingError)"),
        (pickle.dumps({"a": 1}), "is not a checkpoint's index"),
        (pickle.dumps(Metadata({})), "lacks the index's storage part"),
    ],
    ids=["empty", "garbage", "something-else", "without-storage"],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafeReader(tmp_path).read_metadata()
    assert str(caught.value).startswith(f"{tmp_path / '.metadata'} {message}")


def test_a_truncated_index_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: "):
        SafeReader(tmp_path).read_metadata()


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .*No such file"):
        SafeReader(tmp_path).read_metadata()
