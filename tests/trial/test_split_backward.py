"""A backward pass in two leaves the gradients of one, to the bit, whatever a part does with its weights and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from determined_ds.trial.split_backward import input_pass, weight_pass

WIDTH = 4


class Part(torch.nn.Module):
    """Weights used once and twice, beside a path of their own, and none at all; outputs that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.unused = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.randn(WIDTH))
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.normal = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.twice(torch.tanh(self.twice(x))) + self.scale * x
        hidden = self.dropout(self.normal(hidden)) + self.attention(hidden, hidden, hidden)[0]
        return self.frozen(hidden).view(-1, WIDTH).t(), self.scale**2, self.once(y)


def trained(part: Part, backward: Callable[..., None], x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """The gradients of inputs and weights after two micro-batches."""
    found: list[Any] = []
    for number in range(2):
        inputs = [each.clone().requires_grad_() for each in (x + number, y)]
        torch.manual_seed(number)
        outputs = part(*inputs)
        backward(part, outputs, [torch.cos(each.detach()) for each in outputs], inputs)
        found += [each.grad for each in inputs]
    return [*found, *(each.grad for each in part.parameters())]


def whole(part: Part, outputs: Any, gradients: Any, inputs: Any) -> None:
    torch.autograd.backward(outputs, gradients)


def in_two(part: Part, outputs: Any, gradients: Any, inputs: Any) -> None:
    parameters = [each for each in part.parameters() if each.requires_grad]
    before = [None if each.grad is None else each.grad.clone() for each in parameters]
    late = input_pass(outputs, gradients, inputs, parameters)
    for each, grad in zip(parameters, before, strict=True):
        assert (each.grad is None) if grad is None else torch.equal(each.grad, grad)
    weight_pass(late)


def equal(own: list[Any], expected: list[Any]) -> bool:
    return all(
        (a is b) if a is None or b is None else torch.equal(a, b) for a, b in zip(own, expected, strict=True)
    )


@pytest.fixture
def part() -> Part:
    torch.manual_seed(0)
    return Part()


def test_gradients_are_those_of_one_pass(part: Part) -> None:
    x, y = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    assert equal(trained(copy.deepcopy(part), in_two, x, y), trained(part, whole, x, y))
