"""Every job file that we ship is valid for the world size that its header names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titanish.config.load import load_config
from titanish.models.registry import resolve_size

FOLDER = Path(__file__).parents[2] / "train_configs"
FILES = sorted(FOLDER.glob("*.toml"))


def world_size(path: Path) -> int:
    """The number of ranks in the file's first comment; 1 where it names none."""
    header = "\n".join(
        line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("#")
    )
    named = re.search(r"world size (\d+)", header)
    return int(named[1]) if named else 1


def test_there_is_a_file_for_each_published_size() -> None:
    sizes = {f"llama3_{size}.toml" for size in ("1b", "3b", "8b", "70b", "405b")}
    assert sizes <= {path.name for path in FILES}
    assert all(world_size(FOLDER / name) > 1 for name in sizes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_job_file_is_valid_but_for_what_the_user_must_bring(path: Path) -> None:
    loaded = load_config(path, world_size=world_size(path), resolve_size=resolve_size)
    assert {note.key for note in loaded.notes} <= {"model.hf_assets_path", "training.dataset_path"}
    assert loaded.batch is not None
