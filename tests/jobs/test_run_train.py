"""`./run_train.sh` from the outside: what it prints, what it leaves behind, how it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.jobs.launch import ROOT, SMALL, free_port, rows, run_train


def test_default_job_prints_and_leaves_what_it_should(tmp_path: Path) -> None:
    flags = [flag for flag in SMALL if flag != "--no-sample.enable"]
    ended = run_train(
        *flags, "--training.steps=4", "--sample.max_new_tokens=5", f"--job.dump_folder={tmp_path}"
    )
    assert ended.code == 0, ended.output
    assert "world 1 = pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 1" in ended.output
    assert "global batch 4 = 1 batch ranks x 1 local x 4 accumulation; 128 tokens a step" in ended.output
    assert "sampled from the trained model after 'def '" in ended.output
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [0, 1, 2, 3, 4]
    assert written[0].keys() == {"step", "validation_loss"}
    assert written[4]["validation_loss"] < written[0]["validation_loss"]
    assert written[4]["mfu"] is None
    assert written[4]["tokens_seen"] == 512
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [r["loss"] for r in written[1:]]
    )
    assert not (tmp_path / "checkpoint").exists()
    # what was written as config.toml runs the same job again
    again = subprocess.run(
        [ROOT / ".venv/bin/titanish", "config", "show", tmp_path / "config.toml"],
        capture_output=True,
        text=True,
    )
    assert "dim = 64" in again.stdout, again.stderr


def test_two_ranks_report_once_and_log_rank_chooses_who(tmp_path: Path) -> None:
    flags = (*SMALL, "--training.steps=2", f"--job.dump_folder={tmp_path}")
    ended = run_train(*flags, "--parallelism.tensor_parallel_degree=2", ranks=2, env={"LOG_RANK": "1"})
    assert ended.code == 0, ended.output
    assert "r1 dp0 tp1 | step 2/2" in ended.output
    assert "INFO r0" not in ended.output
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


def test_tensor_parallel_over_nodes_is_warned_of(tmp_path: Path) -> None:
    """Two nodes of one rank each, as torchrun would start them."""
    flags = (*SMALL, "--training.steps=1", "--no-validation.enable", f"--job.dump_folder={tmp_path}")
    module = ["-m", "titanish.train", "--job.config_file", "train_configs/debug_model.toml", *flags]
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [ROOT / ".venv/bin/python", *module, "--parallelism.tensor_parallel_degree=2"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "parallelism.tensor_parallel_degree = 2 spans nodes of 1 ranks" in outputs[0]


def test_resumes_where_it_ended_and_says_so(tmp_path: Path) -> None:
    flags = (*SMALL, "--checkpoint.enable", "--checkpoint.interval=2", f"--job.dump_folder={tmp_path}")
    assert run_train(*flags, "--training.steps=4").code == 0
    ended = run_train(*flags, "--training.steps=6")
    assert ended.code == 0, ended.output
    assert f"resumed from step 4 of {tmp_path}/checkpoint" in ended.output
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    ended = run_train(*flags, "--training.steps=6", "--debug.seed=5")
    assert ended.code == 0
    assert "step-6 was trained on other data: seed was 0 and is 5; samples may be read again" in ended.output
    assert "step 6 is done already; raise training.steps above it to go on" in ended.output
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]


def test_all_mistakes_are_named_once_before_anything_starts(tmp_path: Path) -> None:
    ended = run_train(
        "--training.seq_lenn=4", "--training.steps=ten", f"--job.dump_folder={tmp_path}/never", ranks=2
    )
    assert ended.code == 1
    assert ended.output.count("unknown key 'training.seq_lenn'") == 1
    assert "did you mean 'training.seq_len'?" in ended.output
    assert 'training.steps = "ten"' in ended.output
    assert "Gloo" not in ended.output
    assert not (tmp_path / "never").exists()


def test_heads_that_tp_cannot_share_are_refused_before_the_model_is_built(tmp_path: Path) -> None:
    ended = run_train(
        *SMALL, "--model.override.n_heads=6", "--model.override.head_dim=16", "--model.override.n_kv_heads=3",
        "--parallelism.tensor_parallel_degree=2", f"--job.dump_folder={tmp_path}", ranks=2
    )  # fmt: skip
    assert ended.code == 1
    assert "3 KV heads" in ended.output
    assert "Traceback" not in ended.own_output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.tokenizer=hf"], ["model.hf_assets_path"]),
        (["--model.tokenizer=hf", "--model.hf_assets_path=/no/such/folder"], ["/no/such/folder"]),
        (["--model.override.vocab_size=200"], ["258", "200"]),
        (["--training.dataset=text", "--training.dataset_path=/no/such/file.jsonl"], ["/no/such/file.jsonl"]),
        (["--checkpoint.enable", "--checkpoint.load_step=7"], ["checkpoint.load_step = 7"]),
        (["--job.dump_folder=/proc/nowhere"], ["/proc/nowhere"]),
    ],
    ids=[
        "no-tokenizer",
        "tokenizer-not-there",
        "tokenizer-too-large",
        "no-data",
        "no-such-step",
        "no-folder",
    ],
)
def test_start_refuses_with_one_clear_error(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    ended = run_train(*SMALL, f"--job.dump_folder={tmp_path}", "--training.steps=1", *flags)
    assert ended.code == 1
    for word in words:
        assert word in ended.own_output
    assert "Traceback" not in ended.own_output


def test_a_users_own_file_is_not_replaced_by_the_record_of_the_run(tmp_path: Path) -> None:
    own = tmp_path / "config.toml"
    own.write_text(f'# mine\nbase = ["{ROOT}/train_configs/debug_model.toml"]\n')
    flags = (*SMALL, "--training.steps=1", "--no-validation.enable", f"--job.dump_folder={tmp_path}")
    ended = run_train(*flags, env={"CONFIG_FILE": str(own)})
    assert ended.code == 1
    assert (
        "config.toml, the record of this run, would replace the file that the run is read from"
        in ended.output
    )
    assert own.read_text().startswith("# mine\n")
    # a record, though, may be run again where it stands
    for config in ("train_configs/debug_model.toml", f"{tmp_path}/run/config.toml"):
        ended = run_train(*flags, f"--job.dump_folder={tmp_path}/run", env={"CONFIG_FILE": config})
        assert ended.code == 0, ended.output


def test_set_up_is_quick_when_done_and_an_active_environment_is_used(tmp_path: Path) -> None:
    """A `python` that finds titanish is taken as it is; the word it prints shows which one ran."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$1" in -c) exit 0;; *) echo "chosen: $OMP_NUM_THREADS $*";; esac\n')
    fake.chmod(0o755)
    environment = {"NGPU": "3", "OMP_NUM_THREADS": "7", "CONFIG_FILE": "my.toml"}
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    command = ["./run_train.sh", "--training.steps=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("chosen: 7 -m torch.distributed.run --nproc_per_node=3 ")
    assert done.stdout.strip().endswith("-m titanish.train --job.config_file my.toml --training.steps=1")
