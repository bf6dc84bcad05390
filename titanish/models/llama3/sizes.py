"""Llama 3 sizes with their parameter and FLOP counts; no torch.

Published figures: Llama 3 herd of models (arXiv 2407.21783, table 3) and the `config.json` of each release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanish.errors import SizeProblem

_POSITIVE = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "vocab_size",
    "max_seq_len",
)
_POSITIVE_FLOATS = ("rope_theta", "norm_eps", "init_std", "rope_factor", "rope_low_freq_factor")


@dataclass(frozen=True)
class Size:
    """Everything that decides the shape and the mathematics of one Llama.

    `head_dim` 0 stands for dim / n_heads. `rope_factor` 1.0 means plain RoPE; above 1.0 the Llama 3.1
    frequency scaling is applied with the other `rope_*` fields. `init_std` is the standard deviation of every
    matrix, except that the two that write into the residual stream (`wo`, `w2`) use
    `init_std / sqrt(2 n_layers)` (Radford et al. 2019, section 2.3).
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    head_dim: int = 0
    max_seq_len: int = 8192
    rope_theta: float = 500_000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_seq_len: int = 8192
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not self.head_dim:  # 0 stands for dim / n_heads, so that an override of dim carries over
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    @classmethod
    def problems(cls, values: Mapping[str, Any]) -> list[SizeProblem]:
        """What is wrong with these constructor arguments, seen together; empty if they make a model."""
        found = [
            SizeProblem(key, values[key], "must be at least 1")
            for key in _POSITIVE
            if values.get(key, 1) < 1 and not (key == "head_dim" and values[key] == 0)
        ]
        found += [
            SizeProblem(key, values[key], "must be greater than 0")
            for key in _POSITIVE_FLOATS
            if values.get(key, 1.0) <= 0
        ]
        if found:
            return found
        dim, n_heads, n_kv_heads = values["dim"], values["n_heads"], values["n_kv_heads"]
        if n_heads % n_kv_heads:
            found.append(SizeProblem("n_kv_heads", n_kv_heads, f"must divide n_heads = {n_heads}"))
        if not values.get("head_dim") and dim % n_heads:
            found.append(SizeProblem("n_heads", n_heads, f"must divide dim = {dim} unless head_dim is given"))
        elif (values.get("head_dim") or dim // n_heads) % 2:
            head_dim = values.get("head_dim") or dim // n_heads
            found.append(SizeProblem("head_dim", head_dim, "must be even: RoPE rotates pairs"))
        low, high = values.get("rope_low_freq_factor", 1.0), values.get("rope_high_freq_factor", 4.0)
        if high <= low:
            found.append(
                SizeProblem("rope_high_freq_factor", high, f"must be above rope_low_freq_factor = {low}")
            )
        return found

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer, its two norms included."""
        attention = self.dim * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        return attention + 3 * self.dim * self.hidden_dim + 2 * self.dim

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        matrices = 1 if self.tied_embeddings else 2
        return self.n_layers * self.layer_parameters + self.dim + matrices * self.vocab_size * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of forward and backward for one token, recomputation not counted.

        Six for every parameter that is multiplied (the input embedding is looked up, not multiplied; a tied
        head is multiplied once; norms are left out), and for the attention scores and values 12 x layers x
        heads x head_dim x seq_len (PaLM, arXiv 2204.02311, appendix B). The number of key/value heads only
        changes the projections. The causal half is not discounted.
        """
        matmul = self.n_layers * (self.layer_parameters - 2 * self.dim) + self.vocab_size * self.dim
        return 6 * matmul + 12 * self.n_layers * self.n_heads * self.head_dim * seq_len


_LLAMA31 = {"vocab_size": 128_256, "max_seq_len": 131_072, "rope_factor": 8.0}
_LLAMA32 = {"vocab_size": 128_256, "max_seq_len": 131_072, "rope_factor": 32.0, "tied_embeddings": True}

FLAVORS: dict[str, dict[str, Any]] = {
    "debugmodel": {
        "dim": 192,
        "n_layers": 6,
        "n_heads": 4,
        "n_kv_heads": 2,
        "hidden_dim": 384,
        "vocab_size": 258,  # 256 bytes, BOS, EOS
        "max_seq_len": 2048,
        "rope_theta": 10_000.0,
    },
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 8192, **_LLAMA32},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "hidden_dim": 8192, **_LLAMA32},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14_336, **_LLAMA31},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "hidden_dim": 28_672, **_LLAMA31},
    "405B": {
        "dim": 16_384,
        "n_layers": 126,
        "n_heads": 128,
        "n_kv_heads": 8,
        "hidden_dim": 53_248,
        **_LLAMA31,
    },
}
