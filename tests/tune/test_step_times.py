"""The seconds of a step by a machine's measured figures, and what is assumed where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from determined_ds.config.strategy import Strategy
from determined_ds.memory import ModelShape
from determined_ds.memory.estimate import checkpoint_copies_bytes
from determined_ds.tune.rates import OF_PEAK, Rates
from determined_ds.tune.step_times import STEP_BYTES, checkpoint_seconds, step_times
from tests.tune.bases import SHAPE
from tests.tune.measured_machine import BUS, FLOPS, GPUS, LATENCY_S, MEMORY, WRITES, machine

RATES = Rates(accelerator="cpu", machine=machine())
LARGE: ModelShape = replace(SHAPE, num_parameters=10**9)
SIZE = 4e9  # bytes of its gradients in fp32


def strategy(**fields: object) -> Strategy:
    return replace(
        Strategy(precision="fp32", replicas=2, micro_batch_size=8, reduce_bucket_size=10**8), **fields
    )  # type: ignore[arg-type]


def test_compute_is_operations_over_those_that_training_reached() -> None:
    times = step_times(strategy(), LARGE, RATES)
    operations = 6 * 10**9 * LARGE.sequence_length * 8
    assert times.compute_s == pytest.approx(operations / FLOPS + RATES.start_s)


def test_of_several_timed_steps_the_nearest_in_size_counts() -> None:
    [step] = machine().steps
    large = replace(step, model="large", num_parameters=10**9, micro_batch_size=64, flops=8 * FLOPS)
    rates = Rates(accelerator="cpu", machine=machine(steps=(step, large)))
    assert rates.flops_per_s(strategy(micro_batch_size=16), 10**6) == FLOPS
    assert rates.flops_per_s(strategy(micro_batch_size=32), 10**9) == 4 * FLOPS


def test_where_training_was_not_timed_it_is_a_share_of_the_peak() -> None:
    rates = Rates(accelerator="cpu", machine=machine(steps=()))
    assert rates.flops_per_s(strategy(), 10**6) == OF_PEAK * 4 * FLOPS
    assert rates.knows_training
    assert not Rates(accelerator="cpu", machine=machine(steps=(), peaks=())).knows_training
    assert not Rates(accelerator="cpu").knows_training


@pytest.mark.parametrize(
    ("zero_stage", "collectives"),
    [
        (0, [(1, 10)]),  # ten buckets are all-reduced
        (1, [(1, 10), (0.5, 2)]),  # and the parameters gathered, in buckets of 500M elements
        (2, [(1, 10), (0.5, 2)]),
        (3, [(0.5, 10), (0.5, 20), (0.5, 20)]),  # reduced and scattered; gathered in each direction
    ],
)
def test_communication_is_the_strategys_collectives(
    zero_stage: int, collectives: list[tuple[float, int]]
) -> None:
    times = step_times(strategy(zero_stage=zero_stage), LARGE, RATES)
    assert times.communication_s == pytest.approx(
        sum(calls * LATENCY_S + factor * SIZE / BUS for factor, calls in collectives)
    )


def test_stage_2_reduces_after_every_micro_batch() -> None:
    one, four = (
        step_times(strategy(zero_stage=2, micro_batch_size=8 // count, accumulation=count), LARGE, RATES)
        for count in (1, 4)
    )
    assert four.communication_s - one.communication_s == pytest.approx(3 * (10 * LATENCY_S + SIZE / BUS))


def test_a_pipeline_sends_activations_and_waits() -> None:
    piped = strategy(replicas=1, pipe_parallel_size=2, micro_batch_size=2, accumulation=4)
    times = step_times(piped, LARGE, RATES)
    sent = 8 * 2 * LARGE.sequence_length * LARGE.hidden_size * 4
    assert times.communication_s == pytest.approx(8 * LATENCY_S + sent / BUS)
    alone = step_times(replace(piped, pipe_parallel_size=1), LARGE, RATES)
    assert times.compute_s == pytest.approx(
        (alone.compute_s - 4 * RATES.start_s) / 2 * 5 / 4 + 5 * RATES.start_s
    )


def test_the_optimizer_is_its_bytes_over_the_memorys_bandwidth() -> None:
    assert step_times(strategy(), LARGE, RATES).optimizer_s == STEP_BYTES * 10**9 / MEMORY
    assert step_times(strategy(zero_stage=1), LARGE, RATES).optimizer_s == STEP_BYTES * 10**9 / 2 / MEMORY


def test_a_checkpoint_takes_what_writing_took() -> None:
    ours = strategy(zero_stage=1)
    seconds = checkpoint_seconds(ours, LARGE, RATES)
    assert seconds == pytest.approx(checkpoint_copies_bytes(LARGE, ours) / 2 * 2 / WRITES)
    assert checkpoint_seconds(ours, LARGE, Rates(accelerator="cpu")) is None


def test_ranks_beyond_a_machine_are_of_several() -> None:
    rates = Rates(accelerator="cuda", machine=machine(GPUS))
    assert [rates.machines(ranks) for ranks in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert rates.knows_between(8)
    assert not rates.knows_between(16)
    assert Rates(accelerator="cpu").knows_between(1)


def test_without_figures_it_is_what_it_always_was() -> None:
    """Compute by orders of magnitude; all of ZeRO's volumes over one bandwidth."""
    by_stage = [step_times(strategy(zero_stage=stage), LARGE, Rates(accelerator="cpu")) for stage in range(4)]
    volumes = [times.communication_s * 2e9 / SIZE for times in by_stage]
    assert volumes == pytest.approx([1.0, 1.0, 1.0, 1.5])
