"""Llama 3 against transformers: the same logits and gradients from the same weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.hf_llama import copy_weights, give_every_tensor_its_own_scale, hf_llama
from titanish.models.layers import RotaryAngles, apply_rope
from titanish.models.llama3.model import Llama3
from titanish.models.llama3.sizes import Size
from titanish.models.llama3.spec import SPEC

TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 257}
SEQ = 32
SIZES = {
    "plain": Size(**TINY, rope_theta=10_000.0),
    "one-kv-head": Size(**{**TINY, "n_kv_heads": 1}),
    "as-many-kv-heads": Size(**{**TINY, "n_kv_heads": 4}),
    "tied": Size(**TINY, tied_embeddings=True),
    # the first frequency turns ten times in 64 positions, the second twice, the others not once
    "scaled-rope": Size(**TINY, rope_factor=8.0, rope_original_max_seq_len=64),
    "wide-heads": Size(**TINY, head_dim=32),
    "all-of-it": Size(
        **{**TINY, "n_kv_heads": 1},
        head_dim=32,
        tied_embeddings=True,
        norm_eps=1e-3,
        rope_factor=32.0,
        rope_original_max_seq_len=64,
    ),
}


def logits_and_gradients(
    model: nn.Module, logits: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@pytest.mark.parametrize("name", SIZES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    size = SIZES[name]
    reference = hf_llama(size)
    give_every_tensor_its_own_scale(reference)
    model = Llama3(size)
    copy_weights(reference.state_dict(), model, size)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(size.vocab_size, (2, 2, SEQ), generator=generator)
    theirs, their_gradients = logits_and_gradients(reference, reference(tokens).logits, labels)
    ours, our_gradients = logits_and_gradients(model, model.output(model(tokens, torch.arange(SEQ))), labels)
    assert theirs.std() > 0.2  # logits near zero would agree with anything
    # Position 0 is not rotated, so it would agree in any layout.
    assert (ours - theirs)[:, 1:].abs().max() < 1e-4
    names = SPEC.hf_names(size)
    assert {names[ours] for ours in our_gradients} == their_gradients.keys()
    for our_name, gradient in our_gradients.items():
        expected = their_gradients[names[our_name]]
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), our_name


def test_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    plain = RotaryAngles(16, 500_000.0).frequencies
    scaled = RotaryAngles(16, 500_000.0, factor=8.0, original_max_seq_len=64).frequencies
    turns = 64 * plain[1] / (2 * math.pi)
    weight = (turns - 1) / (4 - 1)
    assert scaled[0] == plain[0]
    assert scaled[1] == pytest.approx(plain[1] * (weight + (1 - weight) / 8))
    assert scaled[2:] == pytest.approx([f / 8 for f in plain[2:]])


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_hf_names_are_one_to_one_onto_what_transformers_has(name: str) -> None:
    size = SIZES[name]
    names = SPEC.hf_names(size)
    assert sorted(names) == sorted(n for n, _ in Llama3(size).named_parameters())
    assert sorted(names.values()) == sorted(n for n, _ in hf_llama(size).named_parameters())
    assert len(set(names.values())) == len(names)


def test_rotation_pairs_a_feature_with_the_one_half_a_head_away() -> None:
    # The layout of Hugging Face weights: query and key rows need no reordering on the way in or out.
    x = torch.zeros(1, 3, 1, 8)
    x[..., 1] = 1.0
    angles = RotaryAngles(8, 10_000.0)
    turned = apply_rope(x, angles(torch.arange(3)))[0, :, 0]
    position = torch.arange(3.0)
    expected = torch.zeros(3, 8)
    expected[:, 1] = (position * 10_000 ** (-2 / 8)).cos()
    expected[:, 5] = (position * 10_000 ** (-2 / 8)).sin()
    assert torch.allclose(turned, expected, atol=1e-7)


def test_angles_are_float32_and_rotation_keeps_the_dtype() -> None:
    cos, sin = RotaryAngles(8, 10_000.0).to(torch.bfloat16)(torch.arange(1000))
    assert cos.dtype == sin.dtype == torch.float32
    # in bfloat16 an angle near 100 would be off by up to a quarter
    assert cos[999, 1].item() == pytest.approx(math.cos(999 * 10_000 ** (-2 / 8)), abs=1e-4)
    x = torch.randn(1, 1000, 2, 8, dtype=torch.bfloat16)
    assert apply_rope(x, (cos, sin)).dtype == torch.bfloat16


def test_positions_may_differ_by_row() -> None:
    size = SIZES["plain"]
    model = Llama3(size)
    tokens = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(0))
    shifted = torch.stack((torch.arange(8), torch.arange(8) + 5))
    by_row = model(tokens, shifted)
    for row in range(2):
        alone = model(tokens[row : row + 1], shifted[row])
        assert torch.allclose(by_row[row], alone[0], atol=1e-6)
    # Rotary attention sees only how far apart positions are.
    assert torch.allclose(by_row[1], model(tokens, torch.arange(8))[1], atol=1e-5)


def test_a_later_token_changes_nothing_before_it() -> None:
    model = Llama3(SIZES["plain"])
    tokens = torch.randint(257, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 5] += 1
    before, after = (model(t, torch.arange(8)) for t in (tokens, changed))
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_stage_passes_through_what_it_does_not_have() -> None:
    size = SIZES["plain"]
    model = Llama3(size)
    tokens, positions = torch.randint(257, (1, 8)), torch.arange(8)
    whole = model(tokens, positions)
    norm, second = model.norm, model.layers.pop("1")
    model.norm = None
    first_stage = model(tokens, positions)
    model.tok_embeddings, model.norm = None, norm
    model.layers.pop("0")
    model.layers["1"] = second
    assert torch.equal(model(first_stage, positions), whole)


def test_the_plan_has_a_style_for_every_parameter_of_the_model() -> None:
    size = SIZES["plain"]
    plan = SPEC.tp_plan(size)
    for name, _ in Llama3(size).named_parameters():
        module = name.removesuffix(".weight")
        keys = {module, module.replace(".0.", ".*.").replace(".1.", ".*.")}
        assert keys & plan.keys(), name


def test_tied_names_are_the_tensors_that_are_one() -> None:
    model = Llama3(SIZES["tied"])
    assert SPEC.tied(SIZES["tied"]) == (("output.weight", "tok_embeddings.weight"),)
    assert model.get_parameter("output.weight") is model.get_parameter("tok_embeddings.weight")
    assert SPEC.tied(SIZES["plain"]) == ()
