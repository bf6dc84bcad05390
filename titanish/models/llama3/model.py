"""The Llama 3 decoder as plain modules (Dubey et al., arXiv 2407.21783).

Shapes: batch, seq, dim. A part that a pipeline stage does not have is None and its input passes through.
"""

from __future__ import annotations

from torch import Tensor, nn

from titanish.models.layers import Attention, FeedForward, Rope, RotaryAngles
from titanish.models.llama3.sizes import Size


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.attention = Attention(size.dim, size.n_heads, size.n_kv_heads, size.head_dim)
        self.ffn_norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.feed_forward = FeedForward(size.dim, size.hidden_dim)

    def forward(self, h: Tensor, rope: Rope) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        h = h + self.attention(self.attention_norm(h), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama3(nn.Module):
    """Tokens and their positions -> normalised hidden states; `output` maps those to logits.

    The head is not applied in `forward`: the loss takes hidden states in chunks, so that logits of the whole
    batch never exist, and generation needs the last position alone.
    """

    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocab_size, size.dim)
        self.rope = RotaryAngles(
            size.head_dim,
            size.rope_theta,
            factor=size.rope_factor,
            low_freq_factor=size.rope_low_freq_factor,
            high_freq_factor=size.rope_high_freq_factor,
            original_max_seq_len=size.rope_original_max_seq_len,
        )
        self.layers = nn.ModuleDict({str(i): Layer(size) for i in range(size.n_layers)})
        self.norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.output = nn.Linear(size.dim, size.vocab_size, bias=False)
        if size.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, seq) tokens, or (batch, seq, dim) on a later stage, and (seq,) or (batch, seq) positions.

        Returns:
            (batch, seq, dim) hidden states, normalised where this stage has the norm.
        """
        rope = self.rope(positions)
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, rope)
        return h if self.norm is None else self.norm(h)
