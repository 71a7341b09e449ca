"""How long a step will take: by arithmetic before anything is measured, and as it was measured after that."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.memory import ModelShape
from determined_ds.tune.candidates import Candidate
from determined_ds.tune.cost import MISFIT, NOISE, CostModel, Prediction, arithmetic, memory_bytes
from determined_ds.tune.variants import Variant, decided
from tests.tune.bases import CONST, CPU, CUDA, SHAPE, base_of, gpt2_candidates, named

LARGE = replace(SHAPE, num_parameters=10**9)  # what starting a micro-batch takes is nothing beside it
OWN = 16


def variant(accelerator: Accelerator = CPU, *overrides: str, slots: int = 2, **choice: Any) -> Variant:
    base = base_of(CONST, *overrides, accelerator=accelerator, slots=slots)
    found = decided(base, "", replace(base.own, **{"micro_batch_size": 16, **choice}))
    assert found.can_run, found.reason
    return found


def predicted(model: CostModel, each: Variant, shape: ModelShape = SHAPE) -> Prediction:
    [prediction] = model.predict([each], [shape])
    return prediction


def slower_than(left: Variant, right: Variant, shape: ModelShape = SHAPE) -> bool:
    model = CostModel(OWN)
    return predicted(model, left, shape).log_seconds > predicted(model, right, shape).log_seconds


# ------------------------------------------------------------------------------ before anything is measured


@pytest.mark.parametrize("accelerator", [CPU, CUDA], ids=["cpu", "cuda"])
def test_what_is_known_without_measuring(accelerator: Accelerator) -> None:
    plain = variant(accelerator, zero_stage=0)
    assert slower_than(variant(accelerator, zero_stage=0, activation_checkpointing=True), plain)
    assert slower_than(variant(accelerator, zero_stage=3), plain)
    assert slower_than(variant(accelerator, zero_stage=0, micro_batch_size=1), plain)
    assert slower_than(
        variant(accelerator, zero_stage=2, offload_optimizer=True), variant(accelerator, zero_stage=2)
    )
    all_offloaded = variant(accelerator, zero_stage=3, offload_optimizer=True, offload_param=True)
    assert slower_than(all_offloaded, variant(accelerator, zero_stage=3, offload_optimizer=True))
    assert slower_than(plain, variant(accelerator, zero_stage=0, slots=4, micro_batch_size=8), LARGE)
    assert slower_than(
        plain, variant(accelerator, zero_stage=0, precision="bf16" if accelerator is CPU else None)
    ) == (accelerator is CPU)


def test_a_pipeline_of_more_micro_batches_has_less_of_a_bubble() -> None:
    """(m+p-1)/m of the work of p stages and m micro-batches."""
    times = {
        count: arithmetic(variant(zero_stage=0, pipe_parallel_size=2, micro_batch_size=32 // count), LARGE)
        for count in (2, 4, 8, 16)
    }
    assert sorted(times.values(), reverse=True) == list(times.values())
    assert times[2] / times[16] == pytest.approx((3 / 2) / (17 / 16), rel=0.01)


def test_a_schedule_is_as_long_as_its_bubble_and_its_bookkeeping() -> None:
    pipe = {"zero_stage": 0, "pipe_parallel_size": 2, "micro_batch_size": 4}
    plain = variant(**pipe)
    for schedule, chunks, gain in (("interleaved", 2, 9 / 8.5), ("interleaved", 4, 9 / 8.25)):
        other = variant(**pipe, pipe_schedule=schedule, pipe_chunks=chunks)
        assert arithmetic(plain, LARGE) / arithmetic(other, LARGE) == pytest.approx(gain, rel=0.02)
    model = CostModel(OWN)
    assert predicted(model, variant(**pipe, pipe_schedule="zb-h1"), LARGE).deviation > 0.1
    by_time = predicted(model, variant(**pipe, partition_method="measured"), LARGE)
    assert by_time.log_seconds < predicted(model, plain, LARGE).log_seconds


def test_many_small_micro_batches_cost_a_pipeline_their_starts() -> None:
    """Of a model so small, the best number of them is neither the least nor the most."""
    times = {
        size: arithmetic(variant(zero_stage=0, pipe_parallel_size=2, micro_batch_size=size), SHAPE)
        for size in (1, 2, 4, 8, 16)
    }
    best = min(times, key=lambda size: times[size])
    assert 1 < best < 16


def test_communication_is_zeros() -> None:
    """Stages 2 and 3 reduce after every micro-batch; stage 3 gathers, too."""
    times = {
        (stage, micro): arithmetic(variant(zero_stage=stage, micro_batch_size=micro), LARGE)
        for stage in (1, 2, 3)
        for micro in (4, 16)
    }
    starts = 3 * 0.004
    assert times[1, 4] - times[1, 16] == pytest.approx(starts, rel=1e-3)
    of_reducing = 10**9 * 4 * 0.5 / 2e9
    assert times[2, 4] - times[2, 16] == pytest.approx(starts + 3 * of_reducing, rel=1e-3)
    assert times[3, 16] - times[2, 16] == pytest.approx(
        of_reducing, rel=1e-3
    )  # gathered twice, instead of once
    assert times[3, 4] - times[3, 16] == pytest.approx(starts + 3 * 3 * of_reducing, rel=1e-3)


def test_one_slot_has_nobody_to_talk_to() -> None:
    alone = [arithmetic(variant(slots=1, zero_stage=stage), LARGE) for stage in (0, 1, 2, 3)]
    assert len({round(seconds, 9) for seconds in alone}) == 1


def test_what_the_experiment_states_itself_counts_like_a_choice() -> None:
    key = "hyperparameters.activation_checkpointing"
    stated, chosen = variant(CPU, f"{key}=true"), variant(CPU, activation_checkpointing=True)
    taken_back = variant(CPU, f"{key}=true", activation_checkpointing=False)
    for measure in (arithmetic, memory_bytes):
        assert measure(stated, SHAPE) == measure(chosen, SHAPE) != measure(variant(), SHAPE)
        assert measure(taken_back, SHAPE) == measure(variant(), SHAPE)
    model = CostModel(OWN)
    model.learn(variant(CPU, "hyperparameters.torch_compile=true"), SHAPE, 1.0)
    model.learn(variant(CPU, "hyperparameters.torch_compile=true", torch_compile=False), SHAPE, 2.0)
    assert predicted(model, variant(torch_compile=True)).seconds == pytest.approx(1.0, rel=NOISE)
    assert predicted(model, variant()).seconds == pytest.approx(2.0, rel=NOISE)


# ------------------------------------------------------------------------------------------------- learning


@given(st.integers(0, 49), st.floats(1e-4, 1e3))
def test_what_was_measured_is_predicted(index: int, seconds: float) -> None:
    """Within the noise of measuring; and of everything else is more known than before."""
    candidates = gpt2_candidates()
    variants = [each.variant for each in candidates]
    shapes = [each.shape for each in candidates]
    model = CostModel(OWN)
    before = model.predict(variants, shapes)
    model.learn(variants[index], shapes[index], seconds)
    after = model.predict(variants, shapes)
    assert abs(after[index].log_seconds - math.log(seconds)) < NOISE
    assert after[index].deviation < math.hypot(NOISE, MISFIT)
    assert all(new.deviation < old.deviation for new, old in zip(after, before, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 49), st.floats(1e-3, 10)), min_size=2, max_size=8).flatmap(
        lambda measured: st.tuples(st.just(measured), st.permutations(measured))
    )
)
def test_in_which_order_it_was_learned_does_not_matter(
    both: tuple[list[tuple[int, float]], list[tuple[int, float]]],
) -> None:
    candidates = gpt2_candidates()
    found = []
    for measured in both:
        model = CostModel(OWN)
        for index, seconds in measured:
            model.learn(candidates[index].variant, candidates[index].shape, seconds)
        found.append(
            model.predict([each.variant for each in candidates], [each.shape for each in candidates])
        )
    for left, right in zip(*found, strict=True):
        assert left.log_seconds == pytest.approx(right.log_seconds, abs=1e-9)
        assert left.deviation == pytest.approx(right.deviation, abs=1e-9)


def test_what_one_choice_gains_is_expected_of_it_elsewhere() -> None:
    """bf16 took half the time of ZeRO 1, and of what was not measured ZeRO 0 with bf16 is now the first."""
    candidates = gpt2_candidates()

    def of(name: str) -> Candidate:
        return named(candidates, name)

    model = CostModel(OWN)
    model.learn(candidates[0].variant, SHAPE, 1.0)
    model.learn(of("zero1 micro 16 bf16").variant, SHAPE, 0.5)
    model.learn(of("zero0 micro 16").variant, SHAPE, 0.9)
    left = [each for each in candidates if each.name not in ("zero1 micro 16 bf16", "zero0 micro 16")][1:]
    times = model.predict([each.variant for each in left], [each.shape for each in left])
    first = min(zip(times, left, strict=True), key=lambda item: item[0].log_seconds)
    assert first[1].name == "zero0 micro 16 bf16"
    assert first[0].seconds == pytest.approx(0.45, rel=0.15)


def test_no_variants_have_no_predictions() -> None:
    assert CostModel(OWN).predict([], []) == []


# ----------------------------------------------------------------------------------------- expected gains

logs = st.floats(-10, 10)


@given(logs, st.floats(1e-6, 5), logs)
def test_an_expected_gain_is_no_less_than_the_difference(log: float, deviation: float, best: float) -> None:
    """What may be better or worse than expected is worth trying for the better half; the surer, the less so."""
    gain = Prediction(log_seconds=log, deviation=deviation).expected_improvement(best)
    certain = Prediction(log_seconds=log, deviation=0.0).expected_improvement(best)
    assert certain == max(0.0, best - log)
    assert gain >= certain - 1e-12
    assert gain <= Prediction(log_seconds=log, deviation=2 * deviation).expected_improvement(best) + 1e-12


# ----------------------------------------------------------------------------------------------- memory


def test_memory_goes_with_the_micro_batch_and_without_activations() -> None:
    small, large = (memory_bytes(variant(micro_batch_size=size), SHAPE) for size in (2, 16))
    assert small < large
    assert memory_bytes(variant(activation_checkpointing=True), SHAPE) < large


def test_on_a_cpu_what_is_offloaded_takes_the_same_memory() -> None:
    config = Path("experiments/gpt2/zero3.yaml")
    for accelerator, is_same in ((CPU, True), (CUDA, False)):
        base = base_of(config, accelerator=accelerator)
        plain, offloaded = (
            memory_bytes(decided(base, "", replace(base.own, offload_optimizer=each)), LARGE)
            for each in (False, True)
        )
        assert (offloaded > 0.9 * plain) == is_same
