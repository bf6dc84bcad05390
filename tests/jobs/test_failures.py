"""One rank fails: the job ends, the failing rank is heard first, nothing is left running, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.launch import ROOT, SMALL, Ended, rows, run_train
from titanish.data.indexed import IndexedWriter

LIMIT_SECONDS = 60


def fail(fault: str, tmp_path: Path) -> Ended:
    """Two FSDP ranks, of which rank 1 has `fault`; checks that all is over in time."""
    start = time.monotonic()
    ended = run_train(
        *SMALL, "--training.steps=6", "--checkpoint.enable", "--checkpoint.interval=5",
        f"--job.dump_folder={tmp_path}", ranks=2, module="tests.jobs.faulty", env={"FAULT": fault},
    )  # fmt: skip
    assert time.monotonic() - start < LIMIT_SECONDS
    assert ended.code != 0
    assert not _running(str(tmp_path)), "a rank is still there"
    return ended


def _running(word: str) -> list[str]:
    """Command lines of other processes that hold `word`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in line:
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("data", "tokens.bin cannot be read: Input/output error"),
        ("loader", "the loader cannot start at sample -7"),
    ],
)
def test_error_of_one_rank_ends_all_and_is_shown_first(fault: str, message: str, tmp_path: Path) -> None:
    ended = fail(fault, tmp_path)
    errors = [line for line in ended.output.splitlines() if " ERROR r" in line]
    assert message in errors[0]
    assert " ERROR r1" in errors[0]


@pytest.mark.parametrize("fault", ["killed-in-step-3", "killed-in-save"])
def test_death_of_one_rank_ends_all_and_is_named(fault: str, tmp_path: Path) -> None:
    ended = fail(fault, tmp_path)
    assert "Signal 9 (SIGKILL) received" in ended.output
    assert "rank      : 1" in ended.output
    assert "ERROR r0 dp0 | lost the connection to another rank, which ended" in ended.output
    assert "Traceback" not in ended.own_output
    assert not list((tmp_path / "checkpoint").glob("step-*"))


def test_torchrun_restarts_a_job_that_resumes_by_itself_and_leaves_a_trace(tmp_path: Path) -> None:
    ended = run_train(
        *SMALL, "--training.steps=6", "--checkpoint.enable", "--checkpoint.interval=2",
        "--comm.trace_buf_size=20", "--comm.save_traces_folder=lost", "--comm.save_traces_file_prefix=of_",
        f"--job.dump_folder={tmp_path}", ranks=2, module="tests.jobs.faulty",
        env={"FAULT": "killed-in-step-3"}, launcher_flags=["--max-restarts=1"],
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert (
        "| torchrun's restart 1 of 1 goes on from step 2, the last complete checkpoint "
        f"({tmp_path}/checkpoint/step-2)"
    ) in ended.output
    assert "resumed from step 2" in ended.output
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    trace = tmp_path / "lost/of_0.json"
    assert f"| the last collectives of this rank are in {trace}" in ended.output
    assert os.listdir(trace.parent) == [trace.name]
    entries = json.loads(trace.read_text())["entries"]
    assert len(entries) == 20
    assert {entry["profiling_name"] for entry in entries} >= {"gloo:all_reduce"}


def test_a_broken_data_file_is_named_once_by_ranks_that_all_see_it(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype("uint16")) as writer:
        writer.add_document([5] * 500)
    os.truncate(tmp_path / "tokens.bin", 700)
    ended = run_train(
        *SMALL, "--no-validation.enable", "--training.dataset=megatron",
        f"--training.dataset_path={tmp_path}/tokens", f"--job.dump_folder={tmp_path}/out", ranks=2,
    )  # fmt: skip
    assert ended.code == 1
    (error,) = [line for line in ended.output.splitlines() if " ERROR r" in line]
    assert f"{tmp_path}/tokens.bin" in error
    assert "700" in error
    assert "Traceback" not in ended.own_output


def test_a_signal_ends_a_process_with_the_step_a_checkpoint_and_exit_code_0(tmp_path: Path) -> None:
    module = ["-m", "titanish.train", "--job.config_file", "train_configs/debug_model.toml"]
    flags = [*SMALL, "--training.steps=100000", "--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    with subprocess.Popen(
        [ROOT / ".venv/bin/python", *module, *flags, "--no-validation.enable"], cwd=ROOT,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "step 2/" in line:
                process.terminate()
                break
        output = process.stderr.read()
        assert process.wait(60) == 0, output
    stopped = re.search(
        r"SIGTERM on rank 0: training stops after step (\d+); a checkpoint of it is saved", output
    )
    assert stopped, output
    assert f"goes on from step {stopped[1]}, the last complete checkpoint" in output
    assert (tmp_path / f"checkpoint/step-{stopped[1]}/titanish.json").exists()


def test_resume_skips_what_is_broken_and_names_it(tmp_path: Path) -> None:
    flags = (*SMALL, "--checkpoint.enable", "--checkpoint.interval=5", f"--job.dump_folder={tmp_path}")
    assert run_train(*flags, "--training.steps=5").code == 0
    folder = tmp_path / "checkpoint"
    for step in (20, 30):
        shutil.copytree(folder / "step-5", folder / f"step-{step}")
        manifest = folder / f"step-{step}/titanish.json"
        manifest.write_text(manifest.read_text().replace('"step": 5', f'"step": {step}'))
    (folder / "step-20/.metadata").unlink()
    shard = next((folder / "step-30").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    (folder / "step-abc").write_text("")
    ended = run_train(*flags, "--training.steps=6")
    assert ended.code == 0, ended.output
    assert "resumed from step 5" in ended.output
    assert f"skipping {folder}/step-20: .metadata is missing" in ended.output
    assert f"skipping {folder}/step-30: {shard.name} has" in ended.output
    assert f"skipping {folder}/step-abc" in ended.output
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]


def test_only_broken_checkpoints_are_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoint/step-8").mkdir(parents=True)
    ended = run_train(*SMALL, "--checkpoint.enable", "--training.steps=1", f"--job.dump_folder={tmp_path}")
    assert ended.code == 1
    assert "no usable checkpoint" in ended.output
    assert "step-8: titanish.json is missing" in ended.output
    assert not (tmp_path / "metrics.jsonl").exists()
