"""What the flight recorder is told, and what is written of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanish.runtime import traces
from titanish.runtime.traces import record_collectives, write_trace


def test_the_recorder_is_set_by_its_environment() -> None:
    environment: dict[str, str] = {}
    record_collectives(300, Path("out/traces/rank_"), environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "300",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "out/traces/rank_",
    }


def test_what_the_user_has_set_stays_and_0_turns_it_off() -> None:
    environment = {"TORCH_FR_BUFFER_SIZE": "7"}
    record_collectives(0, Path("x"), environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "7"}
    environment.clear()
    record_collectives(0, Path("x"), environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "0"}


class Recorder:
    def __init__(self, text: bytes) -> None:
        self.text = text

    def _dump_fr_trace_json(self) -> bytes:
        return self.text


def test_a_trace_is_written_under_prefix_and_rank_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefix = tmp_path / "traces/rank_"
    monkeypatch.setattr(traces, "_distributed_c10d", Recorder(b'{"version":"2"}'))
    assert write_trace(prefix, 3) is None
    assert not prefix.parent.exists()
    monkeypatch.setattr(traces, "_distributed_c10d", Recorder(b'{"entries":[]}'))
    assert write_trace(prefix, 3) == tmp_path / "traces/rank_3.json"
    assert (tmp_path / "traces/rank_3.json").read_bytes() == b'{"entries":[]}'
