"""How a failure is put: a lost connection in words, the turn of a rank, and where the next start begins."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from titanish.config.schema import Checkpoint
from titanish.train.failing import LostRankError, how_to_go_on, in_words, wait_for_turn


def test_a_lost_connection_is_told_in_words_and_nothing_else_is() -> None:
    error = in_words(RuntimeError("[gloo/pair.cc:537] Connection closed by peer [127.0.0.1]:1234\nmore"))
    assert isinstance(error, LostRankError)
    assert str(error) == (
        "lost the connection to another rank, which ended or did not answer within "
        "comm.train_timeout_seconds; its own error stands above or in the launcher's report "
        "([gloo/pair.cc:537] Connection closed by peer [127.0.0.1]:1234)"
    )
    other = RuntimeError("out of memory")
    assert in_words(other) is other


def test_the_first_rank_speaks_at_once_and_the_others_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for local_rank in range(3):
        wait_for_turn(local_rank)
    assert waited == [2.25, 2.5]


def complete(folder: Path, step: int) -> None:
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")
    about = {"format": 1, "step": step, "tokens_seen": 0, "samples_seen": 0, "files": {".metadata": 0}}
    (path / "titanish.json").write_text(json.dumps(about))


def test_the_next_start_is_foretold(tmp_path: Path) -> None:
    def foretold(environment: dict[str, str] | None = None, **section: object) -> str:
        checkpoint = Checkpoint.model_validate({"enable": True, **section})
        return how_to_go_on(str(tmp_path), checkpoint, environment or {})

    folder = tmp_path / "checkpoint"
    off = "the same command starts at step 0: checkpoint.enable is off, and nothing was saved"
    assert foretold(enable=False) == off
    assert foretold() == f"the same command starts at step 0: there is no complete checkpoint in {folder}"
    complete(folder, 5)
    complete(folder, 10)
    (folder / "step-15").mkdir()
    last = f"step 10, the last complete checkpoint ({folder}/step-10)"
    assert foretold() == f"the same command goes on from {last}"
    assert foretold(load_step=10) == f"the same command goes on from {last}"
    assert foretold(load_step=5) == (
        "the same command goes on from step 5 again, as checkpoint.load_step says; with -1 from " + last
    )
    restarts = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}
    assert foretold(restarts) == f"torchrun's restart 2 of 2 goes on from {last}"
    restarts["TORCHELASTIC_RESTART_COUNT"] = "2"
    assert foretold(restarts) == f"the same command goes on from {last}"
