"""The device that this process computes on, and everything in which devices differ.

No other module asks whether there is a GPU: what depends on it is a field or a method of `Device`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from titanish.errors import ConfigError, TitanishError

GIB = 1024**3

# Peak dense bfloat16 FLOP/s of one torch device, from the vendors' data sheets ("NVIDIA H100 Tensor Core GPU"
# and so on; their "with sparsity" numbers halved; "AMD Instinct MI300X accelerator" and so on). The first
# pattern found in the device's name holds, so a card's variants stand before the card. MI250X is one of its
# two dies, which is what torch sees as a device.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    (r"\bB200\b", 2250e12),
    (r"\bGH200\b", 989e12),
    (r"\bH200 NVL\b", 835e12),
    (r"\bH200\b", 989e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bA30\b", 165e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bMI325X\b", 1307.4e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI250X\b", 191.5e12),
)


def peak_flops(name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the card called `name`; None for a card that `PEAK_BF16_FLOPS` does not
    know."""
    if " MIG " in name:  # a slice of a card, and the data sheet is about the whole
        return None
    return next((flops for pattern, flops in PEAK_BF16_FLOPS if re.search(pattern, name)), None)


@dataclass(frozen=True)
class Device:
    """One process's device: `type` "cuda" or "cpu", the `index` torch knows it by, and the backend for
    collectives.

    `peak_flops` is None where the peak is unknown, as it is for every CPU.
    """

    type: str
    index: int
    backend: str
    name: str
    peak_flops: float | None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index) if self.type == "cuda" else torch.device("cpu")

    @property
    def supports_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16 itself, without emulation (on a CPU: at all, however
        slowly)."""
        return self.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)

    def synchronize(self) -> None:
        """Waits until everything queued on the device is done."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.index)

    def peak_memory_gib(self) -> float:
        """The most memory held since `reset_peak_memory`: reserved on a GPU; on a CPU resident, this process
        alone."""
        if self.type == "cuda":
            return torch.cuda.max_memory_reserved(self.index) / GIB
        return _peak_resident_bytes() / GIB

    def reset_peak_memory(self) -> None:
        """Starts a new peak at what is held now; on a CPU only where the system lets a process do so
        (Linux)."""
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.index)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            return


def select_device(local_rank: int) -> Device:
    """The GPU of that index, made torch's current one; the CPU where torch sees no GPU.

    Raises:
        TitanishError: there are GPUs, but fewer than ranks on this machine.
    """
    if not torch.cuda.is_available():
        return Device(type="cpu", index=0, backend="gloo", name="CPU", peak_flops=None)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise TitanishError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this machine; start at most {count} "
            "rank(s) on it (NGPU of run_train.sh, --nproc_per_node of torchrun), or show more of them in "
            "CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local_rank)
    name = torch.cuda.get_device_name(local_rank)
    return Device(type="cuda", index=local_rank, backend="nccl", name=name, peak_flops=peak_flops(name))


def resolve_param_dtype(choice: str, device: Device) -> tuple[torch.dtype, str]:
    """The dtype that parameters are computed in, and a sentence that says why, for the log.

    `choice` is the value of `training.mixed_precision_param`: "auto", "bfloat16" or "float32".

    Raises:
        ConfigError: bfloat16 was asked for on a GPU that does not have it.
    """
    if choice == "float32":
        return torch.float32, "parameters are computed in float32, as training.mixed_precision_param says"
    if choice == "bfloat16":
        if not device.supports_bfloat16:
            raise ConfigError(
                f'training.mixed_precision_param = "bfloat16": {device.name} has no bfloat16 arithmetic; '
                'write "float32", or "auto" to use bfloat16 only where the GPU has it'
            )
        return torch.bfloat16, "parameters are computed in bfloat16, as training.mixed_precision_param says"
    assert choice == "auto", f"not a value of training.mixed_precision_param: {choice!r}"
    if device.type == "cpu":
        return torch.float32, "parameters are computed in float32: on a CPU bfloat16 is mostly far slower"
    if device.supports_bfloat16:
        return torch.bfloat16, f"parameters are computed in bfloat16: {device.name} has it"
    return torch.float32, f"parameters are computed in float32: {device.name} has no bfloat16 arithmetic"


def _peak_resident_bytes() -> int:
    """The process's peak resident set size."""
    try:
        # Not getrusage: there a process starts with the peak of the one that started it.
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB elsewhere
