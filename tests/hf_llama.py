"""transformers' Llama as the oracle: built offline with random weights, and the way from its weights to ours.

Imported by tests alone: transformers is no dependency of titanish.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from titanish.models.llama3.sizes import Size
from titanish.models.llama3.spec import SPEC
from titanish.parallel.shards import local_box, unique_parameters


def hf_llama(size: Size, dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaForCausalLM:
    """The same model there, with its own initial weights."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": size.rope_theta}
    if size.rope_factor != 1.0:
        rope |= {
            "rope_type": "llama3",
            "factor": size.rope_factor,
            "low_freq_factor": size.rope_low_freq_factor,
            "high_freq_factor": size.rope_high_freq_factor,
            "original_max_position_embeddings": size.rope_original_max_seq_len,
        }
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.dim,
        intermediate_size=size.hidden_dim,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_seq_len,
        rms_norm_eps=size.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=size.tied_embeddings,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


@torch.no_grad()
def give_every_tensor_its_own_scale(model: nn.Module) -> None:
    """Norms too: two tensors of one shape can then not be swapped unnoticed."""
    for index, parameter in enumerate(model.parameters()):
        scale = 0.5 + 0.07 * index
        if parameter.ndim == 1:
            parameter.copy_(scale * (1 + 0.3 * torch.randn_like(parameter)))
        else:
            parameter.mul_(scale * 2)


@torch.no_grad()
def copy_weights(hf: dict[str, Tensor], model: nn.Module, size: Size) -> None:
    """Put whole Hugging Face tensors into `model`, sharded or not; each rank takes its part."""
    names = SPEC.hf_names(size)
    for name, parameter in unique_parameters(model):
        whole = hf[names[name]]
        for dim, (start, length) in enumerate(local_box(parameter)):
            whole = whole.narrow(dim, start, length)
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(whole)
