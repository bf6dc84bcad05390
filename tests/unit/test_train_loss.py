"""The chunked cross-entropy on one rank: torch's own values and gradients, without whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanish.data.loader import IGNORED_LABEL
from titanish.train.loss import TokenLoss

VOCAB, DIM = 257, 24


def case(
    batch: int = 2, seq: int = 9, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> tuple[nn.Linear, Tensor, Tensor]:
    """Head, hidden states and labels of which some do not count; logits spread over several units."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(DIM, vocab, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(batch, seq, DIM, generator=generator)
    labels = torch.randint(vocab, (batch, seq), generator=generator)
    labels[0, 3:5] = IGNORED_LABEL
    return head.to(dtype), hidden.to(dtype).requires_grad_(), labels


def reference(head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of hidden states and weight by torch, in float64."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, head.weight))
    loss = F.cross_entropy(
        (h @ w.t()).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )
    return loss, *torch.autograd.grad(loss, (h, w))


def close(ours: Tensor, expected: Tensor, relative: float) -> bool:
    return bool((ours.double() - expected).norm() <= relative * expected.norm())


# 18 tokens: one at a time, chunks that do not divide them, exactly all, more than all
@pytest.mark.parametrize("chunk", [1, 5, 6, 17, 18, 1000])
def test_loss_and_gradients_are_torchs_whatever_the_chunk(chunk: int) -> None:
    head, hidden, labels = case()
    loss = TokenLoss(head, chunk)(hidden, labels)
    loss.backward()
    expected, d_hidden, d_weight = reference(head, hidden, labels)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert close(hidden.grad, d_hidden, 1e-6)
    assert close(head.weight.grad, d_weight, 1e-6)


def test_the_incoming_gradient_scales_both() -> None:
    head, hidden, labels = case()
    (TokenLoss(head, 5)(hidden, labels) * -0.25).backward()
    _, d_hidden, d_weight = reference(head, hidden, labels)
    assert close(hidden.grad, -0.25 * d_hidden, 1e-6)
    assert close(head.weight.grad, -0.25 * d_weight, 1e-6)


def test_gradients_of_several_calls_add_up() -> None:
    head, hidden, labels = case()
    loss = TokenLoss(head, 5)
    for _ in range(3):
        loss(hidden, labels).backward()
    _, d_hidden, d_weight = reference(head, hidden, labels)
    assert close(hidden.grad, 3 * d_hidden, 1e-6)
    assert close(head.weight.grad, 3 * d_weight, 1e-6)


def test_tokens_that_do_not_count_give_no_loss_and_no_gradient() -> None:
    head, hidden, labels = case()
    loss = TokenLoss(head, 5)(hidden, torch.full_like(labels, IGNORED_LABEL))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


def test_the_gradient_of_an_ignored_token_alone_is_zero() -> None:
    head, hidden, labels = case()
    TokenLoss(head, 5)(hidden, labels).backward()
    ignored = labels == IGNORED_LABEL
    assert ignored.sum() == 2
    assert not hidden.grad[ignored].any()
    assert hidden.grad[~ignored].any(dim=-1).all()


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    head, hidden, labels = case()
    with torch.no_grad():
        hidden *= 1000
    loss = TokenLoss(head, 5)(hidden, labels)
    loss.backward()
    expected, d_hidden, _ = reference(head, hidden, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert close(hidden.grad, d_hidden, 1e-4)


def test_bfloat16_weights_give_a_float32_loss() -> None:
    head, hidden, labels = case(dtype=torch.bfloat16)
    loss = TokenLoss(head, 5)(hidden, labels)
    loss.backward()
    expected, d_hidden, d_weight = reference(head, hidden, labels)
    assert loss.dtype == torch.float32
    # logits of about 5 keep 8 bits
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert close(hidden.grad, d_hidden, 2e-2)
    assert close(head.weight.grad, d_weight, 2e-2)


def test_the_weights_gradient_is_summed_over_chunks_in_float32() -> None:
    # 600 equal tokens, each a chunk: added up in bfloat16, the sum would stop growing after some 256
    head, hidden, labels = case(1, 1, torch.bfloat16)
    one, many = hidden.detach(), hidden.detach().expand(1, 600, DIM).clone().requires_grad_()
    TokenLoss(head, 1)(many, labels.fill_(7).expand(1, 600)).backward()
    _, _, d_weight = reference(head, one.expand(1, 600, DIM), labels.expand(1, 600))
    assert close(head.weight.grad, d_weight, 1e-2)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    head, hidden, labels = case()
    with torch.no_grad(), LargestTensors() as seen:
        loss = TokenLoss(head, 5)(hidden, labels)
    assert loss.item() == pytest.approx(reference(head, hidden, labels)[0].item(), rel=1e-6)
    assert not loss.requires_grad
    assert VOCAB * DIM not in seen.made  # no gradient of the weight


class LargestTensors(TorchDispatchMode):
    """Records the element counts of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:  # no view
                self.made.append(x.numel())
        return out


def test_logits_of_one_chunk_are_the_most_that_exists() -> None:
    head, hidden, labels = case(4, 64)  # 256 tokens x 257 words would be 65792 elements
    with LargestTensors() as seen:
        loss = TokenLoss(head, 32)(hidden, labels)
        loss.backward()
    assert max(seen.made) == 32 * VOCAB


def test_what_is_kept_for_the_backward_pass_is_no_larger_than_hidden_states_and_weight() -> None:
    head, hidden, labels = case(4, 64)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        TokenLoss(head, 32)(hidden, labels)
    assert sorted(kept) == sorted([hidden.numel(), head.weight.numel()])


def test_zero_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    head, hidden, labels = case()
    loss = TokenLoss(head, 5)(torch.zeros_like(hidden), labels)
    assert loss.item() / (labels != IGNORED_LABEL).sum() == pytest.approx(5.549076, rel=1e-6)


def test_a_head_with_a_bias_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no family has a head with a bias"):
        TokenLoss(nn.Linear(DIM, VOCAB), 5)(torch.zeros(1, 1, DIM), torch.zeros(1, 1, dtype=torch.int64))
