"""The equality rows that need GPUs: NCCL, bfloat16, and what only a GPU's memory shows. Skipped without
one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.jobs.launch import ROOT, rows
from tests.ranks.layouts import ADAMW, JOB

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="needs an NVIDIA GPU")]


def train(folder: Path, ranks: int, *flags: str) -> list[dict[str, float]]:
    """Rows of a ten-step run on `ranks` GPUs of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "titanish.train", *JOB, *ADAMW]
    command += [f"--job.dump_folder={folder}", "--metrics.log_freq=1", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(folder)


def differences(a: list[dict[str, float]], b: list[dict[str, float]], name: str) -> list[float]:
    return [abs(x[name] - y[name]) / abs(x[name]) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, (), id="fsdp2"),
        pytest.param(2, ("--parallelism.data_parallel_replicate_degree=2",), id="ddp2"),
        pytest.param(2, ("--parallelism.tensor_parallel_degree=2",), id="tp2"),
        pytest.param(4, ("--parallelism.tensor_parallel_degree=2",), id="fsdp2-tp2"),
    ],
)
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # bfloat16 keeps 8 bits: gradients that are summed in another order differ by some of them
    [pytest.param("float32", 1e-4, id="fp32"), pytest.param("bfloat16", 2e-2, id="bf16")],
)
def test_nccl_trains_what_one_gpu_trains(
    tmp_path: Path, ranks: int, flags: tuple[str, ...], precision: str, tolerance: float
) -> None:
    if ranks > COUNT:
        pytest.skip(f"needs {ranks} GPUs, there are {COUNT}")
    common = (f"--training.mixed_precision_param={precision}", "--training.local_batch_size=3")
    one = train(tmp_path / "one", 1, *common)
    many = train(tmp_path / "many", ranks, *common, *flags)
    assert max(differences(one, many, "loss")) < tolerance


def test_auto_precision_is_bfloat16_and_close_to_float32(tmp_path: Path) -> None:
    local = "--training.local_batch_size=3"
    auto = train(tmp_path / "auto", 1, local)
    bfloat16 = train(tmp_path / "bfloat16", 1, local, "--training.mixed_precision_param=bfloat16")
    float32 = train(tmp_path / "float32", 1, local, "--training.mixed_precision_param=float32")
    assert [row["loss"] for row in auto] == [row["loss"] for row in bfloat16]
    assert 0 < max(differences(float32, auto, "loss")) < 2e-2


def test_first_weights_and_loss_are_those_of_a_cpu(tmp_path: Path) -> None:
    """Weights are drawn on the CPU whatever the device: the first loss differs by rounding alone."""
    flags = (
        "--training.local_batch_size=3",
        "--training.mixed_precision_param=float32",
        "--training.steps=1",
    )
    on_gpu = train(tmp_path / "gpu", 1, *flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        on_cpu = train(tmp_path / "cpu", 1, *flags)
    assert max(differences(on_cpu, on_gpu, "loss")) < 1e-5
