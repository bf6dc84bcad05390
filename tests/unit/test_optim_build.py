"""Optimizers against their formulas in float64, in each of their implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titanish.config.schema import Optimizer
from titanish.optim.build import build_optimizer, set_learning_rate

LR, DECAY, BETA1, BETA2, EPS, MOMENTUM = 0.01, 0.3, 0.8, 0.95, 1e-6, 0.7
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


def adamw(w: Tensor, gradients: list[Tensor], *, decoupled: bool = True) -> Tensor:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2; with `decoupled` False, decay in the gradient."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(gradients, start=1):
        if decoupled:
            w = w * (1 - LR * DECAY)
        else:
            gradient = gradient + DECAY * w
        m = BETA1 * m + (1 - BETA1) * gradient
        v = BETA2 * v + (1 - BETA2) * gradient**2
        w = w - LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
    return w


def adam(w: Tensor, gradients: list[Tensor]) -> Tensor:
    return adamw(w, gradients, decoupled=False)


def sgd(w: Tensor, gradients: list[Tensor]) -> Tensor:
    velocity = torch.zeros_like(w)
    for gradient in gradients:
        velocity = MOMENTUM * velocity + gradient + DECAY * w
        w = w - LR * velocity
    return w


FORMULAS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {"AdamW": adamw, "Adam": adam, "SGD": sgd}


def section(name: str, implementation: str = "fused") -> Optimizer:
    return Optimizer(
        name=name,
        lr=LR,
        weight_decay=DECAY,
        beta1=BETA1,
        beta2=BETA2,
        eps=EPS,
        momentum=MOMENTUM,
        implementation=implementation,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FORMULAS)
def test_three_steps_follow_the_formula(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    gradients = [[torch.randn_like(w) for w in start] for _ in range(3)]
    parameters = [nn.Parameter(w.float()) for w in start]
    optimizer = build_optimizer(section(name, implementation), parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        expected = FORMULAS[name](start[index], [step[index] for step in gradients])
        assert torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-6)
        assert (expected - start[index]).abs().min() > 1e-5  # every element moved


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_implementation_asked_for_is_the_one_used(name: str, implementation: str) -> None:
    (group,) = build_optimizer(section(name, implementation), [nn.Parameter(torch.ones(2))]).param_groups
    if name == "SGD":  # no fused form for sharded parameters
        assert (group["foreach"], bool(group["fused"])) == (implementation != "for-loop", False)
    else:
        assert group["foreach"] == (implementation == "foreach")
        assert group["fused"] == (implementation == "fused")


@pytest.mark.parametrize("name", FORMULAS)
def test_every_parameter_decays(name: str) -> None:
    parameters = {"matrix": nn.Parameter(torch.ones(3, 3)), "norm": nn.Parameter(torch.ones(3))}
    (group,) = build_optimizer(section(name), parameters.values()).param_groups
    assert group["weight_decay"] == DECAY
    assert [id(p) for p in group["params"]] == [id(p) for p in parameters.values()]


def test_a_new_learning_rate_holds_in_the_next_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(Optimizer(name="SGD", lr=0.5, weight_decay=0.0), [parameter])
    set_learning_rate(optimizer, 0.25)
    parameter.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.5))


def test_a_first_adam_step_has_the_size_of_the_learning_rate() -> None:
    # Whatever the gradient's size: the figure that tells a lost bias correction.
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(Optimizer(lr=0.1, weight_decay=0.0), [parameter])
    parameter.grad = torch.tensor([1e-3, -100.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.1, 0.1], rel=1e-4)
