"""Memory and training measured on two ranks: real engines of small transformers."""

from __future__ import annotations

import pytest

from determined_ds.protocol.machine_figures import DEVICE
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.measuring import measure
from determined_ds.runtime.benching.model_sizes import shape_named
from tests.ranks import Ranks


def measured(request: BenchRequest) -> MachineFigures | None:
    return measure(request, say=lambda _: None)


def test_states_are_those_of_the_estimate(two_ranks: Ranks) -> None:
    names = ("zero1", "zero3", "zero2_offload")
    request = BenchRequest(bench="memory", accelerator="cpu", seconds=60, models=("2x128",), strategies=names)
    machine, other = two_ranks.run(measured, request)
    assert other is None
    assert {each.strategy for each in machine.states} == set(names)
    for each in machine.states:
        assert each.num_parameters == shape_named("2x128", "cpu").num_parameters
        assert each.peak_bytes > each.estimated_state_bytes
        assert each.estimated_peak_bytes > each.estimated_state_bytes
        if each.strategy == "zero2_offload":
            assert each.state_error is None
        else:
            assert abs(each.state_error) < 0.1
    [bandwidth] = machine.bandwidths
    assert (bandwidth.place, bandwidth.ranks) == (DEVICE, 2)
    assert bandwidth.bytes_per_s > 1e7


def test_steps_are_timed_beside_the_peak(two_ranks: Ranks) -> None:
    request = BenchRequest(
        bench="training",
        accelerator="cpu",
        seconds=30,
        models=("1x64", "2x64"),
        strategies=("zero1",),
        micro_batches=(1, 4),
    )
    machine, _ = two_ranks.run(measured, request)
    assert [(each.model, each.micro_batch_size, each.samples) for each in machine.steps] == [
        ("1x64", 1, 2),
        ("1x64", 4, 8),
        ("2x64", 1, 2),
        ("2x64", 4, 8),
    ]
    for each in machine.steps:
        assert each.fast_step_seconds <= each.step_seconds <= each.slow_step_seconds
        assert 0 < each.flops_per_s < machine.peak_flops_per_s("fp32", 2)
    assert {(each.precision, each.ranks, each.threads) for each in machine.peaks} == {
        ("fp32", 2, 1),
        ("bf16", 2, 1),
    }


@pytest.mark.long(
    "the same as test_steps_are_timed_beside_the_peak, with a model that there is no memory for"
)
def test_what_does_not_fit_is_left_out_with_a_note(two_ranks: Ranks) -> None:
    request = BenchRequest(
        bench="training",
        accelerator="cpu",
        seconds=10,
        models=("1x64", "200x8192"),
        strategies=("zero0",),
        micro_batches=(1,),
    )
    machine, _ = two_ranks.run(measured, request)
    assert [each.model for each in machine.steps] == ["1x64"]
    assert "200x8192 at 1 samples: about" in machine.measured[0].notes[0]
