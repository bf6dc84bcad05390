"""Text from a model that is being trained, on whatever mesh it is on.

Every rank runs the same forward passes, since sharded weights are gathered by all; rank 0 draws, all go on
with what it drew. Each new token costs a forward over the whole text: enough for a glance at what a model has
learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanish.data.tokenizer import Tokenizer
from titanish.errors import ConfigError


def encode_prompt(tokenizer: Tokenizer, prompt: str, vocab_size: int) -> list[int]:
    """The prompt's ids behind BOS, where the tokenizer has one.

    Raises:
        ConfigError: there is nothing to start from, or the model has no embedding for an id.
    """
    ids = list(tokenizer.encode(prompt))
    if tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    if not ids:
        raise ConfigError(
            f"sample.prompt = {prompt!r}: the tokenizer {tokenizer.name} has no BOS token to start from; "
            "write a prompt, or turn sampling off (sample.enable = false)"
        )
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"sample.prompt = {prompt!r}: the tokenizer {tokenizer.name} gives the id {max(ids)}, but the "
            f"model's vocab_size is {vocab_size}; use its own tokenizer, or sample.enable = false"
        )
    return ids


@torch.no_grad()
def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    max_seq_len: int,
    seed: int,
    device: torch.device,
) -> str | None:
    """The text that follows `prompt`, at most `max_new_tokens` tokens, or up to the tokenizer's EOS.

    None if the model's logits are not finite.

    Args:
        prompt: at least one token id, as `encode_prompt` gives them.
        temperature: divides the logits; 0 takes the likeliest token.
        max_seq_len: the model sees this many tokens back.
        seed: draws the same text again for the same weights.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        token = _next_token(model, ids[-max_seq_len:], temperature, generator, device)
        if token is None:
            return None
        if token == tokenizer.eos_id:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(prompt) :])


def _next_token(
    model: Any, ids: list[int], temperature: float, generator: torch.Generator, device: torch.device
) -> int | None:
    tokens = torch.tensor([ids], device=device)
    hidden = model(tokens, torch.arange(len(ids), device=device))
    logits: Tensor = model.output(hidden[:, -1]).double().squeeze(0).cpu()
    if not logits.isfinite().all():
        token = torch.tensor(-1)
    elif temperature == 0:
        token = logits.argmax()
    else:
        # From the peak down, in float64: no temperature is too small to divide by.
        odds = ((logits - logits.max()) / temperature).softmax(-1)
        token = torch.multinomial(odds, 1, generator=generator).squeeze()
    drawn = token.to(device)
    if dist.is_initialized():
        dist.broadcast(drawn, src=0)
    return None if drawn < 0 else int(drawn)
