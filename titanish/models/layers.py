"""Layers that the decoder families share.

Shapes: batch, seq, dim; heads are q_heads and kv_heads of head_dim features. All sizes are taken from the
tensors that arrive, so the same code runs on a whole layer and on one rank's share of its heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]
"""Cosine and sine of the rotation angles, each (seq, head_dim) or (batch, seq, head_dim), float32."""


class RotaryAngles(nn.Module):
    """Positions -> rotation angles, in the half-split layout (feature i pairs with i + head_dim / 2).

    Angles are computed in float32 from the positions given, so nothing depends on the local sequence length,
    and there is no table to outgrow. Frequencies above `rope_factor` 1.0 follow Llama 3.1: wavelengths longer
    than original_max_seq_len / low_freq_factor are divided by the factor, those shorter than
    original_max_seq_len / high_freq_factor are kept, and the ones between are blended linearly in
    original_max_seq_len / wavelength.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        factor: float = 1.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_seq_len: int = 8192,
    ) -> None:
        super().__init__()
        exponents = [i / head_dim for i in range(0, head_dim, 2)]
        frequencies = [theta**-exponent for exponent in exponents]
        if factor != 1.0:
            frequencies = [
                _scale_frequency(f, factor, low_freq_factor, high_freq_factor, original_max_seq_len)
                for f in frequencies
            ]
        self.frequencies = tuple(frequencies)  # plain numbers: no buffer to lose its precision in a cast

    def forward(self, positions: Tensor) -> Rope:
        """(seq,) or (batch, seq) integer positions -> cosine and sine, each (..., seq, head_dim)."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.unsqueeze(-1).float() * frequencies  # (..., seq, head_dim/2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _scale_frequency(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    rotations = original * frequency / (2 * math.pi)  # full turns within the original context
    if rotations < low:
        return frequency / factor
    if rotations > high:
        return frequency
    blend = (rotations - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate (batch, seq, heads, head_dim) by `rope` in float32 and return it in the dtype of `x`."""
    cos, sin = (angle.unsqueeze(-2) for angle in rope)  # (..., seq, 1, head_dim)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class CausalAttention(nn.Module):
    """The inner step of attention: q, k, v in, o out. Other kernels and context parallelism replace this."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, q_heads, seq, head_dim) and twice (batch, kv_heads, seq, head_dim) -> shape of q."""
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., arXiv 2305.13245) without biases."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        o = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(o.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
