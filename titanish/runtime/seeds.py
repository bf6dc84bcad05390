"""Random number generators: seeded for a rank, made deterministic, saved and restored.

Initial weights and data order do not depend on these (each has a keyed generator of its own); dropout,
sampling and whatever a user's code draws do.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any, Protocol

import numpy as np
import torch


class DebugSection(Protocol):
    """What `set_determinism` reads of the configuration's `[debug]`."""

    @property
    def deterministic(self) -> bool: ...
    @property
    def deterministic_warn_only(self) -> bool: ...


def set_seed(seed: int, *, distinct: int) -> int:
    """Seeds Python's, numpy's and torch's generators on all devices; returns the seed torch got.

    Ranks that must draw the same numbers pass the same `distinct`, ranks that must not pass different ones (a
    number made from their mesh coordinates). Hashed, because generators with neighbouring seeds may start
    alike.
    """
    digest = hashlib.sha256(f"titanish {seed} {distinct}".encode()).digest()
    derived = int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits from everywhere
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
    return derived


def set_determinism(debug: DebugSection) -> None:
    """Makes torch choose deterministic algorithms if `debug.deterministic`; changes nothing otherwise.

    An operation that has none is then an error, or a warning with `debug.deterministic_warn_only`. To be
    called before the first computation on a GPU, since cuBLAS reads its variable once.
    """
    if not debug.deterministic:
        return
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility: a workspace of its own for every stream.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it picks algorithms by their speed, which varies


def rng_state() -> dict[str, Any]:
    """The state of all generators as tensors and plain values, so that `torch.load(weights_only=True)` reads
    it."""
    python_version, python_words, python_gauss = random.getstate()
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python_version": python_version,
        "python_words": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": python_gauss,
        "numpy_kind": str(kind),
        "numpy_words": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "numpy_position": int(position),
        "numpy_has_gauss": int(has_gauss),
        "numpy_gauss": float(gauss),
        "torch_cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts all generators where `rng_state` found them; a GPU's only if both then and now there is one."""
    random.setstate((state["python_version"], tuple(state["python_words"].tolist()), state["python_gauss"]))
    np.random.set_state(
        (
            state["numpy_kind"],
            state["numpy_words"].numpy().astype(np.uint32),
            state["numpy_position"],
            state["numpy_has_gauss"],
            state["numpy_gauss"],
        )
    )
    torch.set_rng_state(state["torch_cpu"].cpu())
    if "torch_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["torch_cuda"].cpu())
