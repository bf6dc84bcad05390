"""Sizes: published parameter counts, FLOPs against a counter, and every way in which a size can be wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from titanish.errors import ConfigError, SizeError
from titanish.models.layers import CausalAttention
from titanish.models.llama3.sizes import FLAVORS, Size
from titanish.models.registry import family_names, flavors, load_spec, resolve_size

PUBLISHED = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
ONE_KV_HEAD = Size(dim=64, n_layers=2, n_heads=4, n_kv_heads=1, hidden_dim=96, vocab_size=256)


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_sizes_have_the_published_parameters(flavor: str) -> None:
    assert resolve_size("llama3", flavor).num_parameters == PUBLISHED[flavor]


@pytest.mark.parametrize(
    "size",
    [
        *(pytest.param(Size(**FLAVORS[flavor]), id=flavor) for flavor in ("debugmodel", "1B", "3B", "8B")),
        pytest.param(ONE_KV_HEAD, id="untied"),
        pytest.param(Size(64, 2, 4, 2, 96, 257, head_dim=32, tied_embeddings=True), id="tied-wide-heads"),
    ],
)
def test_parameter_count_is_that_of_the_built_model(size: Size) -> None:
    with torch.device("meta"):
        model = load_spec("llama3").build(size)
    assert sum(p.numel() for p in model.parameters()) == size.num_parameters
    assert sum(p.numel() for p in model.layers["0"].parameters()) == size.layer_parameters


def test_debug_model_is_as_large_as_a_laptop_trains() -> None:
    assert 1_500_000 <= resolve_size("llama3", "debugmodel").num_parameters <= 4_000_000


class MatmulAttention(CausalAttention):
    """Scores as a plain product, which the counter counts; the fused kernel on CPU it does not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        mask = torch.full((q.size(2), q.size(2)), -torch.inf).triu(1)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 + mask
        return scores.softmax(-1) @ v


def counted_flops(size: Size, seq: int) -> int:
    """FLOPs of forward and backward, measured, for each token."""
    model = load_spec("llama3").build(size)
    for layer in model.layers.values():
        layer.attention.inner = MatmulAttention()
    tokens = torch.randint(size.vocab_size, (2, seq))
    with FlopCounterMode(display=False) as counter:
        logits = model.output(model(tokens, torch.arange(seq)))
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert counter.get_total_flops() % tokens.numel() == 0
    return counter.get_total_flops() // tokens.numel()


def test_flops_per_token_of_the_disputed_case() -> None:
    # 73728 multiplied weights x 6, and 12 x 2 layers x 4 heads x 16 x 128; the one KV head is in the first.
    assert ONE_KV_HEAD.flops_per_token(128) == 638_976


@pytest.mark.parametrize(
    ("size", "seq"),
    [
        pytest.param(ONE_KV_HEAD, 128, id="one-kv-head"),
        pytest.param(Size(64, 2, 4, 4, 96, 257, tied_embeddings=True), 32, id="tied"),
        pytest.param(Size(64, 3, 4, 2, 96, 257, head_dim=32), 48, id="wide-heads"),
    ],
)
def test_flops_per_token_are_those_that_a_counter_counts(size: Size, seq: int) -> None:
    assert size.flops_per_token(seq) == counted_flops(size, seq)


def test_the_test_attention_is_the_models_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    assert torch.allclose(MatmulAttention()(q, k, v), CausalAttention()(q, k, v), atol=1e-6)


def test_a_tied_head_is_multiplied_once_like_any_other() -> None:
    tied = Size(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=1, hidden_dim=96, vocab_size=256, tied_embeddings=True
    )
    assert tied.flops_per_token(128) == ONE_KV_HEAD.flops_per_token(128)
    assert tied.num_parameters == ONE_KV_HEAD.num_parameters - 256 * 64


def test_head_dim_follows_an_override_of_dim_unless_given() -> None:
    assert resolve_size("llama3", "debugmodel", {"dim": 64}).head_dim == 16
    assert resolve_size("llama3", "debugmodel", {"dim": 64, "head_dim": 32}).head_dim == 32


def test_overrides_replace_the_flavors_fields() -> None:
    size = resolve_size("llama3", "8B", {"n_layers": 2, "rope_theta": 10_000})
    assert (size.n_layers, size.rope_theta, size.dim) == (2, 10_000, 4096)


def test_an_unknown_field_names_the_nearest() -> None:
    assert _problem({"n_layer": 4}) == (
        "n_layer",
        4,
        "unknown size field; known: dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size, head_dim, "
        "max_seq_len, rope_theta, rope_factor, rope_low_freq_factor, rope_high_freq_factor, "
        "rope_original_max_seq_len, norm_eps, tied_embeddings, init_std",
        "n_layers",
    )
    assert _problem({"colour": 4})[3] == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"dim": "64"}, "must be an integer"),
        ({"dim": 64.0}, "must be an integer"),
        ({"n_layers": True}, "must be an integer"),
        ({"norm_eps": "small"}, "must be a number"),
        ({"rope_theta": True}, "must be a number"),
        ({"tied_embeddings": 1}, "must be true or false"),
        ({"dim": 0}, "must be at least 1"),
        ({"n_layers": -1}, "must be at least 1"),
        ({"head_dim": -2}, "must be at least 1"),
        ({"rope_factor": 0.0}, "must be greater than 0"),
        ({"rope_theta": -1.0}, "must be greater than 0"),
        ({"norm_eps": 0.0}, "must be greater than 0"),
        ({"init_std": 0.0}, "must be greater than 0"),
        ({"rope_low_freq_factor": 0.0}, "must be greater than 0"),
        ({"n_kv_heads": 3}, "must divide n_heads = 4"),
        ({"head_dim": 15}, "must be even: RoPE rotates pairs"),
        ({"rope_high_freq_factor": 1.0}, "must be above rope_low_freq_factor = 1.0"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_rule(override: dict[str, object], message: str) -> None:
    (field,) = override
    assert _problem(override) == (field, override[field], message, "")


@pytest.mark.parametrize(
    ("override", "field", "value", "message"),
    [
        ({"n_heads": 3}, "n_kv_heads", 2, "must divide n_heads = 3"),
        ({"dim": 62}, "n_heads", 4, "must divide dim = 62 unless head_dim is given"),
        ({"dim": 60}, "head_dim", 15, "must be even: RoPE rotates pairs"),
    ],
    ids=str,
)
def test_a_field_that_no_longer_fits_is_named(
    override: dict[str, object], field: str, value: int, message: str
) -> None:
    assert _problem(override) == (field, value, message, "")


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_size("llama3", "debugmodel", {"n_layer": 4, "dim": "64", "norm_eps": 1e-5})
    assert str(caught.value).startswith("n_layer = 4: unknown size field; known: dim, ")
    assert str(caught.value).endswith("; dim = '64': must be an integer")


def test_an_unknown_model_or_flavor_names_what_there_is() -> None:
    with pytest.raises(SizeError) as caught:
        resolve_size("lama3", "8B")
    assert str(caught.value) == "name = 'lama3': unknown model; known: llama3"
    assert caught.value.problems[0].nearest == "llama3"
    with pytest.raises(SizeError) as caught:
        resolve_size("llama3", "80B")
    assert str(caught.value) == f"flavor = '80B': unknown flavor; known: {', '.join(FLAVORS)}"
    assert caught.value.problems[0].nearest == "8B"


def _problem(override: dict[str, object]) -> tuple[str, object, str, str]:
    with pytest.raises(SizeError) as caught:
        resolve_size("llama3", "debugmodel", override)
    (problem,) = caught.value.problems
    return problem.field, problem.value, problem.message, problem.nearest


def test_the_registry_lists_families_and_their_flavors() -> None:
    assert family_names() == ("llama3",)
    assert flavors("llama3") == FLAVORS
    assert load_spec("llama3").name == "llama3"
