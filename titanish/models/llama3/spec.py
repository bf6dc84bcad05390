"""What Llama 3 tells titanish about itself."""

from __future__ import annotations

import math

from titanish.models.llama3.model import Llama3
from titanish.models.llama3.sizes import Size
from titanish.models.plan import (
    Column,
    GatherSequence,
    Row,
    Sequence,
    TensorParallelPlan,
    VocabEmbedding,
    VocabHead,
)
from titanish.models.spec import Init, ModelSpec


def _tp_plan(size: Size) -> TensorParallelPlan:
    return {
        "tok_embeddings": VocabEmbedding(),
        "layers.*.attention_norm": Sequence(),
        "layers.*.attention": GatherSequence(),
        "layers.*.attention.wq": Column(blocks=size.n_heads),
        "layers.*.attention.wk": Column(blocks=size.n_kv_heads),
        "layers.*.attention.wv": Column(blocks=size.n_kv_heads),
        "layers.*.attention.wo": Row(),
        "layers.*.ffn_norm": Sequence(),
        "layers.*.feed_forward": GatherSequence(),
        "layers.*.feed_forward.w1": Column(),
        "layers.*.feed_forward.w3": Column(),
        "layers.*.feed_forward.w2": Row(),
        "norm": Sequence(),
        "output": VocabHead(),
    }


def _init(size: Size, name: str) -> Init:
    if name.endswith("norm.weight"):
        return Init(constant=1.0)
    if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
        return Init(std=size.init_std / math.sqrt(2 * size.n_layers))
    return Init(std=size.init_std)


def _tied(size: Size) -> tuple[tuple[str, str], ...]:
    return (("output.weight", "tok_embeddings.weight"),) if size.tied_embeddings else ()


_HF_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}


def _hf_names(size: Size) -> dict[str, str]:
    """Tensors are equal under this renaming: both sides use the half-split RoPE layout.

    A tied head has no tensor of its own on the Hugging Face side and is left out.
    """
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for layer in range(size.n_layers):
        names |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{hf}" for ours, hf in _HF_LAYER.items()}
    return names if size.tied_embeddings else names | {"output.weight": "lm_head.weight"}


SPEC = ModelSpec(
    name="llama3",
    build=Llama3,
    init=_init,
    tp_plan=_tp_plan,
    tied=_tied,
    hf_names=_hf_names,
    hf_architecture="LlamaForCausalLM",
)
