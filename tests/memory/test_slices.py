"""Ranks that share sequences keep their part of the activations, as the estimate has it."""

from __future__ import annotations

import pytest

from determined_ds.config.strategy import Strategy
from determined_ds.memory import memory_per_rank, shape_from_sizes
from determined_ds.memory.activations import activation_bytes
from tests.ranks import Ranks

TOKENS, SAMPLES = 512, 2


def kept_bytes(size: int) -> int:
    """What the forward pass of GPT-2 keeps in this rank for the backward pass, parameters aside."""
    import deepspeed
    import torch

    from determined_ds import SequenceGroup
    from model_defs.common.text import next_token_loss
    from model_defs.gpt2.model import GPT2, gpt2_config

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    group = SequenceGroup(size)
    config = gpt2_config(vocab_size=256, sequence_length=TOKENS, attention=group.attention())
    model = GPT2(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = group.cut(torch.zeros(SAMPLES, TOKENS, dtype=torch.int64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = next_token_loss(model(tokens, group.positions(tokens.shape[1])), tokens, group)
    loss.backward()
    return sum(kept.values())


def test_activations_are_divided_by_the_ranks_of_a_group(one_rank: Ranks, two_ranks: Ranks) -> None:
    (whole,) = one_rank.run(kept_bytes, 1)
    for slices in two_ranks.run(kept_bytes, 2):
        assert slices == pytest.approx(whole / 2, rel=0.10)


def test_the_estimate_divides_activations_and_states() -> None:
    shape = shape_from_sizes(
        num_layers=4, hidden_size=128, num_heads=4, vocab_size=256, sequence_length=TOKENS
    )
    whole = Strategy(zero_stage=3, micro_batch_size=SAMPLES)
    sliced = Strategy(zero_stage=3, micro_batch_size=SAMPLES, sequence_parallel_size=2)
    assert activation_bytes(shape, sliced) == activation_bytes(shape, whole) // 2
    states, of_slices = (memory_per_rank(shape, each).model_states_bytes for each in (whole, sliced))
    assert of_slices == pytest.approx(states / 2, rel=0.01)
