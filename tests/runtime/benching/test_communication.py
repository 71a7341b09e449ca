"""Collectives timed on two ranks: every size has a time, by torch and by DeepSpeed's log, which are alike."""

from __future__ import annotations

import pytest

from determined_ds.protocol.machine_figures import COLLECTIVES, bus_factor
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.runtime.benching.bench_communication import sizes_to
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.measuring import measure
from determined_ds.runtime.benching.timing import join
from tests.ranks import Ranks


def measured(request: BenchRequest) -> MachineFigures | None:
    return measure(request, say=lambda _: None)


def test_every_collective_has_its_times(two_ranks: Ranks) -> None:
    request = BenchRequest(bench="communication", accelerator="cpu", seconds=2, largest_bytes=2**14)
    machine, other = two_ranks.run(measured, request)
    assert other is None
    assert [each.name for each in machine.collectives] == list(COLLECTIVES)
    for each in machine.collectives:
        assert (each.ranks, each.machines, each.backend, each.dtype) == (2, 1, "gloo", "float32")
        sizes = [point.size_bytes for point in each.points]
        assert sizes == sizes_to(2**14)[: len(sizes)]
        assert sizes == sizes_to(2**14) or any(
            note.startswith(each.name) for note in machine.measured[0].notes
        )
        assert all(0 < point.fast_seconds <= point.seconds <= point.slow_seconds for point in each.points)
        # The same calls, with a look at the clock around each; far from the sum of all calls, which the log would hold.
        ratios = sorted(point.deepspeed_seconds / point.seconds for point in each.points)
        assert 0.1 < ratios[0] <= ratios[-1] < 10, each
    [signed] = machine.measured
    assert (signed.bench, signed.ranks) == ("communication", 2)
    assert any(version.startswith("deepspeed 0.") for version in signed.versions)


def test_without_time_for_them_the_largest_are_left_out(two_ranks: Ranks) -> None:
    request = BenchRequest(
        bench="communication",
        accelerator="cpu",
        seconds=0.01,
        collectives=("all_reduce",),
        largest_bytes=2**24,
    )
    machine, _ = two_ranks.run(measured, request)
    [collective] = machine.collectives
    assert 1 <= len(collective.points) < len(sizes_to(2**24))
    assert machine.measured[0].notes[0].startswith("all_reduce: no time was left for")


def logged_seconds() -> list[float]:
    """What DeepSpeed's log says of eight calls of one size, by itself."""
    import deepspeed.comm as dist
    import torch
    from deepspeed.comm import comm

    join("cpu", 10, lambda _: None)
    comm.comms_logger.enabled = comm.comms_logger.prof_all = True
    for _ in range(8):
        dist.all_reduce(torch.zeros(2**20))
    comm.comms_logger.enabled = False
    [[_, milliseconds, *_]] = comm.comms_logger.comms_dict["all_reduce"].values()
    return [each / 1000 for each in milliseconds]


def test_deepspeeds_log_by_itself_adds_all_calls_up(two_ranks: Ranks) -> None:
    """Why each call has a new timer here. Where this fails, DeepSpeed resets it, and ours need not."""
    seconds, _ = two_ranks.run(logged_seconds)
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def logged_bandwidths() -> dict[str, float]:
    """By DeepSpeed's log, the bus bandwidth of a call in which a whole of 8 KiB takes a second, in bytes per second."""
    import deepspeed.comm as dist
    import torch
    from deepspeed.comm.utils import get_msg_size_from_args
    from deepspeed.utils.comms_logging import calc_bw_log

    join("cpu", 10, lambda _: None)
    whole, part = torch.zeros(2048), torch.zeros(1024)
    calls = {
        "all_reduce": (dist.all_reduce, [whole]),
        "reduce_scatter": (dist.reduce_scatter_tensor, [part, whole]),
        "all_gather": (dist.all_gather_into_tensor, [whole, part]),
    }
    found = {}
    for name, (call, tensors) in calls.items():
        function = call.__closure__[call.__code__.co_freevars.index("func")].cell_contents  # that is logged
        size = get_msg_size_from_args(function, *tensors)
        _, gigabits = calc_bw_log(function.__name__, size, 1000.0)
        found[name] = gigabits * 1e9 / 8
    return found


def test_deepspeed_multiplies_a_reduce_scatter_by_the_ranks_once_more(two_ranks: Ranks) -> None:
    """As the table says. Where this fails, it no longer does."""
    found, _ = two_ranks.run(logged_bandwidths)
    ours = {name: bus_factor(name, 2) * 8192 for name in found}
    assert found == {
        "all_reduce": pytest.approx(ours["all_reduce"]),
        "reduce_scatter": pytest.approx(2 * ours["reduce_scatter"]),
        "all_gather": pytest.approx(ours["all_gather"]),
    }
