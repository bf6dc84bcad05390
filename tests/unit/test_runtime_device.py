"""The device: what is chosen, what is known about it, and the dtype that follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanish.errors import ConfigError, TitanishError
from titanish.runtime.device import Device, peak_flops, resolve_param_dtype, select_device

CPU = Device(type="cpu", index=0, backend="gloo", name="CPU", peak_flops=None)
GPU = Device(type="cuda", index=1, backend="nccl", name="NVIDIA X", peak_flops=None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch as it is on a machine with two H100; the list records which was made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    return current


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_peak_is_that_of_the_cards_data_sheet(name: str, flops: float) -> None:
    assert peak_flops(name) == flops


@pytest.mark.parametrize(
    "name", ["CPU", "Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H1000", "NVIDIA GB200"]
)
def test_peak_of_an_unknown_card_or_a_slice_of_one_is_not_made_up(name: str) -> None:
    assert peak_flops(name) is None


def test_without_a_gpu_the_cpu_and_gloo_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(3) == CPU
    assert CPU.torch_device == torch.device("cpu")


def test_a_rank_gets_the_gpu_of_its_index_and_nccl(two_gpus: list[int]) -> None:
    device = select_device(1)
    assert (device.type, device.index, device.backend, device.peak_flops) == ("cuda", 1, "nccl", 989e12)
    assert device.torch_device == torch.device("cuda", 1)
    assert two_gpus == [1]


def test_more_ranks_than_gpus_is_an_error_with_both_numbers(two_gpus: list[int]) -> None:
    with pytest.raises(TitanishError, match=r"local rank 2 has no GPU: torch sees 2 .*at most 2 rank.*NGPU"):
        select_device(2)


def test_cpu_peak_memory_counts_what_was_held_and_freed() -> None:
    before = CPU.peak_memory_gib()
    held = torch.ones(1 << 26)  # 256 MiB, touched
    del held
    after = CPU.peak_memory_gib()
    assert after >= before
    assert 0.25 < after < 64


def test_cpu_peak_is_reset_where_the_system_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(Path, "write_text", lambda path, text: written.append((str(path), text)))
    CPU.reset_peak_memory()
    assert written == [("/proc/self/clear_refs", "5")]


def test_cpu_peak_that_cannot_be_reset_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", refuse)
    CPU.reset_peak_memory()
    assert CPU.peak_memory_gib() > 0


def test_cpu_peak_memory_is_known_without_a_proc_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert 0.05 < CPU.peak_memory_gib() < 64  # torch is loaded, so some tens of MiB in any unit that is right


@pytest.mark.parametrize(
    ("choice", "device", "has_bfloat16", "dtype", "reason"),
    [
        ("auto", CPU, False, torch.float32, "on a CPU bfloat16 is mostly far slower"),
        ("auto", GPU, True, torch.bfloat16, "NVIDIA X has it"),
        ("auto", GPU, False, torch.float32, "NVIDIA X has no bfloat16"),
        ("float32", GPU, True, torch.float32, "as training.mixed_precision_param says"),
        ("bfloat16", GPU, True, torch.bfloat16, "as training.mixed_precision_param says"),
        ("bfloat16", CPU, False, torch.bfloat16, "as training.mixed_precision_param says"),
    ],
)
def test_param_dtype_and_the_reason_that_is_logged(
    choice: str,
    device: Device,
    has_bfloat16: bool,
    dtype: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    chosen, sentence = resolve_param_dtype(choice, device)
    assert chosen is dtype
    assert sentence.startswith("parameters are computed in")
    assert reason in sentence


def test_bfloat16_on_a_gpu_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    expected = (
        r'training.mixed_precision_param = "bfloat16": NVIDIA X has no bfloat16 .*write "float32", or "auto"'
    )
    with pytest.raises(ConfigError, match=expected):
        resolve_param_dtype("bfloat16", GPU)
