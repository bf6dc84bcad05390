"""One run at a time in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanish.errors import TitanishError
from titanish.runtime.folder import claimed


def test_a_second_run_in_the_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    refused = rf"is in use by another run \(process {os.getpid()}\); wait for it"
    with claimed(tmp_path / "run"), pytest.raises(TitanishError, match=refused), claimed(tmp_path / "run"):
        pass


def test_a_folder_is_free_after_its_run_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claimed(tmp_path):
        raise RuntimeError
    with claimed(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("name", ["/proc/nowhere", "/dev/null/below", "a\0b"])
def test_a_folder_that_cannot_be_written_to_is_named(name: str) -> None:
    with (
        pytest.raises(TitanishError, match=r"job.dump_folder = .* cannot be written to: "),
        claimed(Path(name)),
    ):
        pass
