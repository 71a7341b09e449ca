"""A step's floating-point operations, beside the formula for transformers and the counts of DeepSpeed's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from deepspeed.profiling.flops_profiler import get_model_profile

from determined_ds.runtime.profiling.flops import FlopCount, StepFlops

SAMPLES, TOKENS, LAYERS, WIDTH, WORDS = 2, 128, 4, 128, 256
# 6 x parameters in matrices x tokens, and 12 x layers x width x tokens x sequence length for attention.
ANALYTIC = SAMPLES * TOKENS * (6 * (12 * LAYERS * WIDTH**2 + WORDS * WIDTH) + 12 * LAYERS * WIDTH * TOKENS)


def model_flops(step: Callable[[], Any]) -> StepFlops:
    """What is counted of a step while it is taken."""
    with FlopCount() as count:
        step()
    return count.so_far


def gpt2(attention: str = "sdpa", dropout: float = 0.0) -> Any:
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=4,
        vocab_size=WORDS,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=dropout,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config).train()


def loss_of(model: Any, device: str = "cpu") -> torch.Tensor:
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long, device=device)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize(("attention", "dropout"), [("eager", 0.1), ("sdpa", 0.1), ("sdpa", 0.0)])
def test_a_transformers_step_has_the_operations_of_the_formula(attention: str, dropout: float) -> None:
    model = gpt2(attention, dropout)
    found = model_flops(lambda: loss_of(model).backward())
    assert found.model == ANALYTIC
    assert found.backward == 2 * found.forward
    # Fused attention keeps no scores: its backward pass multiplies query by key again.
    is_fused = attention == "sdpa" and not dropout
    assert found.again == (2 * SAMPLES * LAYERS * WIDTH * TOKENS**2 if is_fused else 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_is_counted_apart(reentrant: bool) -> None:
    model = gpt2("eager")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = model_flops(lambda: loss_of(model).backward())
    assert found.model == ANALYTIC
    assert found.again == found.forward - 2 * SAMPLES * TOKENS * WIDTH * WORDS  # all blocks, and not the head


def test_on_meta_tensors_the_count_is_the_same() -> None:
    model = gpt2().to("meta")
    assert model_flops(lambda: loss_of(model, "meta").backward()).model == ANALYTIC


def test_what_needs_no_gradient_has_none() -> None:
    """DeepSpeed's profiler would take the backward pass for twice the forward pass."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    model[0].requires_grad_(False)
    found = model_flops(lambda: model(torch.ones(8, 16)).sum().backward())
    assert (found.forward, found.backward) == (2 * 8 * (16 * 16 + 16 * 4), 2 * 8 * 16 * 4)


def test_convolutions_and_recurrent_layers_count() -> None:
    convolution = torch.nn.Conv2d(3, 8, 3)
    found = model_flops(lambda: convolution(torch.ones(1, 3, 10, 10)).sum().backward())
    assert found.forward == found.backward == 2 * 8 * 8 * 8 * 3 * 9  # no gradient of the input
    recurrent = torch.nn.LSTM(16, 32)
    found = model_flops(lambda: recurrent(torch.ones(5, 8, 16))[0].sum().backward())
    assert found.forward == 2 * 40 * 4 * 32 * (16 + 32)


def test_deepspeeds_profiler_counts_the_same_forward_pass_and_elementwise_operators_too() -> None:
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    flops, _, _ = get_model_profile(
        gpt2(), kwargs={"input_ids": ids, "labels": ids}, print_profile=False, as_string=False, warm_up=0
    )
    assert 1 < 3 * flops / ANALYTIC < 1.01


def test_deepspeeds_profiler_misses_what_is_called_by_another_name() -> None:
    class ByName(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16, 16))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.ops.aten.mm(inputs, self.weight)
            return found

    model, inputs = ByName(), torch.ones(8, 16)
    flops, _, _ = get_model_profile(model, args=[inputs], print_profile=False, as_string=False, warm_up=0)
    assert flops == 0
    assert model_flops(lambda: model(inputs).sum().backward()).model == 2 * 2 * 8 * 16 * 16


def test_counting_changes_nothing() -> None:
    """Neither a number of the step, nor the generator, which dropout draws from in both."""

    def step(counted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gpt2(dropout=0.1)
        if counted:
            model_flops(lambda: loss_of(model).backward())
        else:
            loss_of(model).backward()
        return [*(parameter.grad for parameter in model.parameters()), torch.get_rng_state()]

    assert all(torch.equal(left, right) for left, right in zip(step(True), step(False), strict=True))


def test_what_does_not_count_is_left_out() -> None:
    is_training = True
    left, count = torch.ones(4, 4), FlopCount(lambda: is_training)
    with count:
        left @ left
    is_training = False
    with count:
        left @ left
    assert count.so_far.model == count.so_far.done == 2 * 4**3
