"""The memory model against the papers it is taken from, and against its own sense."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.strategy import Strategy
from determined_ds.errors import ConfigError
from determined_ds.memory import (
    MeasuredActivations,
    Memory,
    ModelShape,
    alternatives,
    fits,
    largest_micro_batch,
    memory_per_rank,
    shape_from_sizes,
    transformer_parameters,
    usable_bytes,
)
from determined_ds.memory.activations import activation_bytes, head_bytes
from determined_ds.memory.fitting import device_bytes

STAGES = (0, 1, 2, 3)
PRECISIONS = ("bf16", "fp16", "fp32")
PARTS = ("parameters_bytes", "gradients_bytes", "optimizer_states_bytes")

shapes = st.builds(
    ModelShape,
    num_parameters=st.integers(1000, 10**12),
    num_layers=st.integers(0, 200),
    hidden_size=st.integers(1, 2**15),
    num_heads=st.integers(1, 128),
    vocab_size=st.integers(0, 300_000),
    sequence_length=st.integers(1, 2**17),
)
strategies = st.builds(
    Strategy,
    zero_stage=st.sampled_from(STAGES),
    precision=st.sampled_from(PRECISIONS),
    offload_optimizer=st.sampled_from([None, "cpu", "nvme"]),
    offload_param=st.sampled_from([None, "cpu"]),
    replicas=st.integers(1, 1024),
    pipe_parallel_size=st.integers(1, 16),
    micro_batch_size=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    activation_checkpointing=st.booleans(),
    num_optimizer_states=st.integers(0, 2),
    overlap_comm=st.sampled_from([None, True, False]),
    contiguous_gradients=st.booleans(),
)


# ------------------------------------------------------------------------------------ the papers' numbers


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_papers_bytes_per_parameter(precision: str, replicas: int) -> None:
    """arXiv 1910.02054, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N, to the byte."""
    num_parameters = 128 * 10**6
    shape = ModelShape(num_parameters=num_parameters)
    paper = (16, 4 + 12 / replicas, 2 + 14 / replicas, 16 / replicas)
    for stage, bytes_a_parameter in zip(STAGES, paper, strict=True):
        strategy = Strategy(zero_stage=stage, precision=precision, replicas=replicas)
        assert memory_per_rank(shape, strategy).model_states_bytes == bytes_a_parameter * num_parameters


def test_zero_papers_seven_billion_on_64_gpus() -> None:
    """Its figure 1 in GB: 120, 31.4, 16.6, 1.9."""
    shape = ModelShape(num_parameters=7_500_000_000)
    states = [
        memory_per_rank(shape, Strategy(zero_stage=stage, replicas=64)).model_states_bytes / 1e9
        for stage in STAGES
    ]
    assert states == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_megatrons_bytes_of_a_block() -> None:
    """arXiv 2205.05198: 34 sbh, where attention keeps no scores; here without a vocabulary or a last norm."""
    s, b, h, layers = 2048, 4, 1024, 12
    shape = ModelShape(num_parameters=10**8, num_layers=layers, hidden_size=h, sequence_length=s)
    norm_and_head = 2 * 2 * s * b * h
    assert activation_bytes(shape, Strategy(micro_batch_size=b)) == 34 * s * b * h * layers + norm_and_head


def test_parameters_of_gpt2() -> None:
    """Those that transformers counts in the published sizes."""
    for layers, hidden, count in ((12, 768, 124_439_808), (24, 1024, 354_823_168), (48, 1600, 1_557_611_200)):
        sizes = {"vocab_size": 50257, "num_positions": 1024}
        assert transformer_parameters(num_layers=layers, hidden_size=hidden, **sizes) == count
        shape = shape_from_sizes(
            num_layers=layers, hidden_size=hidden, vocab_size=50257, sequence_length=1024
        )
        assert shape.num_parameters == count


# --------------------------------------------------------------------------------------------- its sense


@given(shapes, strategies)
def test_more_replicas_never_take_more(shape: ModelShape, strategy: Strategy) -> None:
    many = memory_per_rank(shape, replace(strategy, replicas=2 * strategy.replicas))
    few = memory_per_rank(shape, strategy)
    slack = 2 * 16 * 2  # padding of each part to a multiple of the replicas
    assert all(getattr(many, part) <= getattr(few, part) + slack for part in PARTS)
    assert many.host_bytes <= few.host_bytes + slack


@given(shapes, strategies)
def test_a_higher_stage_takes_no_more_states(shape: ModelShape, strategy: Strategy) -> None:
    strategy = replace(strategy, offload_optimizer=None, offload_param=None, pipe_parallel_size=1)
    # In fp32 stage 1 has a copy of the parameters that stage 0 does without: it pays from two replicas on.
    if strategy.precision == "fp32":
        strategy = replace(strategy, replicas=2 * strategy.replicas, num_optimizer_states=2)
    states = [
        memory_per_rank(shape, replace(strategy, zero_stage=stage)).model_states_bytes for stage in STAGES
    ]
    slack = 16 * 2 * strategy.replicas
    assert all(higher <= lower + slack for lower, higher in itertools.pairwise(states))


@given(shapes, strategies)
def test_no_part_is_negative_and_the_parts_add_up(shape: ModelShape, strategy: Strategy) -> None:
    memory = memory_per_rank(shape, strategy)
    parts = [*PARTS, "activations_bytes", "buffers_bytes"]
    assert all(getattr(memory, part) >= 0 for part in (*parts, "host_bytes"))
    assert memory.total_bytes == sum(getattr(memory, part) for part in parts)


@given(shapes, strategies)
def test_offloading_moves_states_to_the_host(shape: ModelShape, strategy: Strategy) -> None:
    strategy = replace(strategy, zero_stage=max(1, strategy.zero_stage), offload_param=None)
    here = memory_per_rank(shape, replace(strategy, offload_optimizer=None))
    there = memory_per_rank(shape, replace(strategy, offload_optimizer="cpu"))
    assert there.optimizer_states_bytes == 0
    assert there.host_bytes >= here.optimizer_states_bytes
    assert there.model_states_bytes <= here.model_states_bytes


@given(shapes, strategies, st.integers(2, 8))
def test_activations_grow_with_the_micro_batch(shape: ModelShape, strategy: Strategy, times: int) -> None:
    more = replace(strategy, micro_batch_size=times * strategy.micro_batch_size)
    assert activation_bytes(shape, more) >= activation_bytes(shape, strategy)
    checkpointed = replace(strategy, activation_checkpointing=True)
    assert activation_bytes(shape, checkpointed) <= activation_bytes(
        shape, replace(strategy, activation_checkpointing=False)
    )


@given(shapes, strategies, st.integers(2**30, 2**40))
def test_the_largest_micro_batch_fits_and_the_next_does_not(
    shape: ModelShape, strategy: Strategy, gpu: int
) -> None:
    largest = largest_micro_batch(shape, strategy, gpu)
    if largest is None:
        assert not shape.num_layers or not fits(shape, replace(strategy, micro_batch_size=1), gpu)
    else:
        assert fits(shape, replace(strategy, micro_batch_size=largest), gpu)
        if largest < 2**20:
            assert not fits(shape, replace(strategy, micro_batch_size=largest + 1), gpu)


@given(st.integers(0, 2**45))
def test_a_device_of_the_bytes_that_are_asked_for_is_enough(tensors: int) -> None:
    assert usable_bytes(device_bytes(tensors)) >= tensors


# ------------------------------------------------------------------------------------------ the strategies

SIX_BILLION = shape_from_sizes(num_parameters=6 * 10**9, num_layers=28, hidden_size=4096)


def test_strategies_that_fit_come_cheapest_first() -> None:
    found = [each for each in alternatives(Strategy(replicas=8)) if fits(SIX_BILLION, each, 80 * 2**30)]
    assert [strategy.zero_stage for strategy in found] == [1, 2, 3, 1, 2, 3, 3]
    assert not any(fits(SIX_BILLION, each, 2**31) for each in alternatives(Strategy(replicas=8)))


def test_a_pipeline_is_tried_as_one_first() -> None:
    asked = Strategy(pipe_parallel_size=4, replicas=2, zero_stage=1)
    found = alternatives(asked)
    assert [(s.pipe_parallel_size, s.zero_stage) for s in found[:3]] == [(4, 0), (4, 1), (1, 0)]
    assert {strategy.slots for strategy in found} == {8}


def test_a_pipeline_stage_is_the_largest_one() -> None:
    shape = ModelShape(num_parameters=100, stage_parameters=(60, 50))
    pipeline = Strategy(pipe_parallel_size=2, precision="fp16")
    assert memory_per_rank(shape, pipeline).parameters_bytes == 2 * 60


def test_the_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    shape = ModelShape(
        num_parameters=1000, num_layers=4, activations=MeasuredActivations(bytes_per_sample=400)
    )
    four = Strategy(pipe_parallel_size=4, accumulation=8)
    assert activation_bytes(shape, four) == 400
    assert activation_bytes(shape, replace(four, accumulation=1)) == 100


def test_frozen_parameters_have_no_states() -> None:
    frozen = ModelShape(num_parameters=1000, num_trainable_parameters=100)
    memory = memory_per_rank(frozen, Strategy())
    assert (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_states_bytes) == (
        2000,
        200,
        1200,
    )


def test_measured_activations_go_before_the_formula() -> None:
    measured = replace(SIX_BILLION, activations=MeasuredActivations(bytes_per_sample=10**10, fixed_bytes=5))
    assert activation_bytes(measured, Strategy(micro_batch_size=2)) == 2 * 10**10 + 5
    assert activation_bytes(measured, Strategy(precision="fp32")) == 2 * 10**10 + 10
    assert activation_bytes(measured.at_sequence_length(512), Strategy()) == 10**10 // 2 + 5
    assert head_bytes(SIX_BILLION, Strategy()) == 1024 * 50257 * 10


def test_a_default_bucket_counts_however_small_the_model_is() -> None:
    """DeepSpeed allocates ``reduce_bucket_size`` elements at once."""
    memory: Memory = memory_per_rank(ModelShape(num_parameters=1000), Strategy(zero_stage=2, replicas=2))
    assert memory.buffers_bytes >= 2 * 500_000_000


# ------------------------------------------------------------------------------------------- derived sizes


@given(st.integers(10**6, 10**12))
def test_a_count_alone_gives_a_plausible_model(count: int) -> None:
    shape = shape_from_sizes(num_parameters=count)
    made = transformer_parameters(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size
    )
    assert made == pytest.approx(count, rel=0.35)
    assert shape.hidden_size % shape.num_heads == 0
    assert any("layers of width" in assumption for assumption in shape.assumptions)


def test_sizes_that_make_no_model_are_refused() -> None:
    for sizes, key in (
        ({}, "--params"),
        ({"num_layers": 4}, "--params"),
        ({"num_parameters": 10**9, "hidden_size": 100, "num_heads": 7}, "--hidden"),
        ({"num_parameters": 1000, "num_layers": 10, "hidden_size": 4096}, "--params"),
    ):
        with pytest.raises(ConfigError) as caught:
            shape_from_sizes(**sizes)
        assert [problem.key for problem in caught.value.problems] == [key]
        assert caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("sizes", "said", "fix"),
    [
        ({"num_parameters": 6}, "too few for a transformer", "write 6B or 6M"),
        ({"num_parameters": 6 * 10**9, "num_layers": 10**12}, "too few for --layers", "a smaller --layers"),
        ({"num_parameters": 10**6, "hidden_size": 4096}, "too few for --hidden", "a smaller --hidden"),
    ],
)
def test_parameters_that_no_such_transformer_is_made_of_are_refused(
    sizes: dict[str, int], said: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_sizes(**sizes)
    (problem,) = caught.value.problems
    assert said in problem.message
    assert fix in problem.fix
