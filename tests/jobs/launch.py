"""Starts jobs as a user does, and reads what they left behind."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# The default job, cut down to what a test can wait for.
SMALL = (
    "--model.override.dim=64",
    "--model.override.hidden_dim=96",
    "--model.override.n_layers=2",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--validation.steps=2",
    "--validation.local_batch_size=1",
    "--metrics.log_freq=1",
    "--no-sample.enable",
)


@dataclass(frozen=True)
class Ended:
    """A finished job: its exit code and everything that it printed."""

    code: int
    output: str

    @property
    def own_output(self) -> str:
        """What titanish printed: all before torchrun reports that a rank has failed."""
        return re.split(r"^.*failed \(exitcode", self.output, maxsplit=1, flags=re.MULTILINE)[0]


def run_train(
    *flags: str,
    ranks: int = 1,
    module: str | None = None,
    env: Mapping[str, str] | None = None,
    launcher_flags: Sequence[str] = (),
) -> Ended:
    """`NGPU=ranks ./run_train.sh FLAGS`, or the same torchrun line around another module of the tests, there
    with `launcher_flags`."""
    environment = {**os.environ, "NGPU": str(ranks), "OMP_NUM_THREADS": "1", **(env or {})}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command: Sequence[str] = ["./run_train.sh", *flags]
    if module is not None:
        launcher = [
            str(ROOT / ".venv/bin/python"),
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
        ]
        rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        config = ["--job.config_file", "train_configs/debug_model.toml"]
        command = [*launcher, *rendezvous, *launcher_flags, "-m", module, *config, *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout)


def rows(dump_folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
