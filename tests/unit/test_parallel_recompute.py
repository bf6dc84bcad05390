"""What recompute runs again in the backward pass, counted, and that each of its settings reaches torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from titanish.config.schema import ActivationCheckpoint
from titanish.models.llama3.model import Llama3
from titanish.models.llama3.sizes import Size
from titanish.parallel.recompute import apply_recompute

SIZE = Size(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)
LINEARS = 7  # matrix products of one layer's forward: wq wk wv wo w1 w2 w3
mm = torch.ops.aten.mm.default


def model_with(**settings: Any) -> Llama3:
    torch.manual_seed(0)
    model = Llama3(SIZE)
    apply_recompute(model.layers, ActivationCheckpoint(**settings))
    return model


def hidden(model: Llama3) -> Tensor:
    tokens = torch.arange(16).reshape(1, 16)
    return model(tokens, torch.arange(16))


class Operators(TorchDispatchMode):
    """Counts operators, and the shapes of what matrix products multiply with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.weights: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        if func is mm:
            self.weights[tuple(args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def backward_operators(**settings: Any) -> Operators:
    loss = hidden(model_with(**settings)).sum()
    with Operators() as seen:
        loss.backward()
    return seen


def forwards_by_layer(**settings: Any) -> list[int]:
    """How often each layer's attention norm ran in forward and backward together."""
    model = model_with(**settings)
    counts = [0] * SIZE.n_layers
    for index, layer in enumerate(model.layers.values()):

        def count(module: nn.Module, args: Any, index: int = index) -> None:
            counts[index] += 1

        layer.attention_norm.register_forward_pre_hook(count)
    hidden(model).sum().backward()
    return counts


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "none"}, [1, 1, 1, 1]),
        ({"mode": "full"}, [2, 2, 2, 2]),
        ({"mode": "selective", "selective_ac_option": "1"}, [2, 2, 2, 2]),
        ({"mode": "selective", "selective_ac_option": "2"}, [1, 2, 1, 2]),
        ({"mode": "selective", "selective_ac_option": "3"}, [1, 1, 2, 1]),
        ({"mode": "selective", "selective_ac_option": "5"}, [1, 1, 1, 1]),
        ({"mode": "selective", "selective_ac_option": "op"}, [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_layers_run_again_as_the_mode_says(settings: dict[str, Any], expected: list[int]) -> None:
    assert forwards_by_layer(**settings) == expected


def test_names_and_state_are_those_of_the_plain_model() -> None:
    plain, recomputed = Llama3(SIZE), model_with(mode="full")
    assert list(recomputed.state_dict()) == list(plain.state_dict())


GRADIENT_PRODUCTS = 2 * LINEARS * SIZE.n_layers  # one for the input, one for the weight


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"mode": "none"}, 0),
        ({"mode": "full"}, LINEARS * SIZE.n_layers),
        ({"mode": "selective", "selective_ac_option": "2"}, LINEARS * 2),
        # the 1st, 3rd, 5th and 7th product of a layer are kept: wq, wv, w1 and w2
        ({"mode": "selective", "selective_ac_option": "op"}, 3 * SIZE.n_layers),
    ],
    ids=str,
)
def test_matrix_products_of_the_backward_pass(settings: dict[str, Any], again: int) -> None:
    assert backward_operators(**settings).calls[mm] == GRADIENT_PRODUCTS + again


def test_operator_recompute_keeps_attention() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    op = {"mode": "selective", "selective_ac_option": "op"}
    assert backward_operators(mode="full").calls[attention] == SIZE.n_layers
    assert backward_operators(**op).calls[attention] == 0


def test_products_with_a_named_weight_are_always_recomputed() -> None:
    op = {"mode": "selective", "selective_ac_option": "op"}
    shape = (SIZE.hidden_dim, SIZE.dim)  # of w2 as the product sees it; the first gradients have it too
    usual = backward_operators(**op)
    forced = backward_operators(**op, per_op_sac_force_recompute_mm_shapes_by_fqns=("feed_forward.w2",))
    # w2 was kept. Without it among the counted products wq, wv and w1 stay the kept ones.
    assert forced.weights[shape] == usual.weights[shape] + SIZE.n_layers
    assert forced.calls[mm] == usual.calls[mm] + SIZE.n_layers
    unknown = backward_operators(**op, per_op_sac_force_recompute_mm_shapes_by_fqns=("moe.router.gate",))
    assert unknown.calls == usual.calls


def test_early_stop_leaves_out_what_the_backward_does_not_need() -> None:
    # The layer's last product: its result is added and needed by nobody.
    whole, early = (backward_operators(mode="full", early_stop=stop).calls[mm] for stop in (False, True))
    assert whole - early == SIZE.n_layers


class Dropping(nn.Module):
    """A layer with randomness in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        dropped = nn.functional.dropout(x * self.weight, 0.5)
        self.seen.append(dropped.detach())
        return dropped * self.weight


@pytest.mark.parametrize("preserve", [True, False])
def test_the_forwards_random_state_comes_back_if_it_is_preserved(preserve: bool) -> None:
    torch.manual_seed(0)
    layer = Dropping()
    apply_recompute(
        nn.ModuleDict({"0": layer}), ActivationCheckpoint(mode="full", preserve_rng_state=preserve)
    )
    layer(torch.ones(1000)).sum().backward()
    first, again = layer.seen
    assert torch.equal(first, again) == preserve


class Changing(nn.Module):
    """A layer whose second forward keeps a tensor of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.to(torch.float32 if self.calls == 1 else torch.float64).sin().float()


@pytest.mark.parametrize("check", ["default", "none"])
def test_a_recomputation_that_differs_is_noticed_if_it_is_checked(check: str) -> None:
    layer = Changing()
    apply_recompute(nn.ModuleDict({"0": layer}), ActivationCheckpoint(mode="full", determinism_check=check))
    loss = layer(torch.ones(3, requires_grad=True)).sum()
    if check == "none":
        loss.backward()
        assert layer.calls == 2
    else:
        with pytest.raises(CheckpointError, match="different metadata"):
            loss.backward()


@pytest.mark.parametrize("debug", [False, True])
def test_debug_shows_the_operators_of_both_passes(debug: bool) -> None:
    layer = Changing()
    apply_recompute(nn.ModuleDict({"0": layer}), ActivationCheckpoint(mode="full", debug=debug))
    loss = layer(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    assert ("aten::sin" in str(caught.value) or "sin.default" in str(caught.value)) == debug
