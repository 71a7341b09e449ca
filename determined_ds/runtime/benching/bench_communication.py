"""Collectives over the ranks, timed by size: through torch, and beside it through DeepSpeed with its own log.

1. At each size, torch's calls and DeepSpeed's are timed in turns, several calls between two looks at the clock where
   one takes microseconds.
2. A time is that of the slowest rank; a send is half of one there and back between the first and the last rank.
3. A line through the times is the latency and the bandwidth.

``ds_bench`` is a script of DeepSpeed's whose code is not in its package, and which times nothing on a CPU. What it
reports is what ``deepspeed.comm`` logs, by the same formulas (``calc_bw_log``): that is what is taken here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from determined_ds.protocol.machine_figures import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SEND_RECV,
    Collective,
    Transfer,
    bus_factor,
)
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.latency import latency_and_slope, quartiles
from determined_ds.runtime.benching.timing import Group

SMALLEST_BYTES = 2**10
APART = 4  # times as large as the one before
TRIED = 4  # calls before them, of which the first warms up
AT_A_TIME = 5  # rounds between two looks at what time is left
MOST_ROUNDS = 60
ROUND_S = 0.003  # about how long calls are repeated between two looks at the clock
MOST_CALLS = 100
# Names in DeepSpeed's log.
LOGGED = {
    ALL_REDUCE: ("all_reduce",),
    REDUCE_SCATTER: ("reduce_scatter_tensor",),
    ALL_GATHER: ("all_gather_into_tensor",),
    ALL_TO_ALL: ("all_to_all_single",),
    BROADCAST: ("broadcast",),
    SEND_RECV: ("send", "recv"),
}


def measure_communication(group: Group, request: BenchRequest) -> tuple[Collective, ...]:
    """Time the requested collectives; those that the backend has not are left out, with a note.

    Args:
        group: Two ranks or more.
        request: Which, up to which size, and for how long.
    """
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that are going to change
    found = []
    for index, name in enumerate(request.collectives):
        budget_s = group.left_s() / (len(request.collectives) - index)
        why_not = _refusal(group, name, request.dtype)
        if why_not:
            group.notes.append(f"{name} is not offered by {group.backend}: {why_not}")
            group.say(group.notes[-1])
            continue
        points = _points(group, name, request, budget_s)
        latency, slope = latency_and_slope(
            [point.size_bytes for point in points], [point.seconds for point in points]
        )
        found.append(
            Collective(
                name=name,
                ranks=group.distributed.size,
                machines=group.machines,
                backend=group.backend,
                dtype=request.dtype,
                latency_s=latency,
                bus_bytes_per_s=bus_factor(name, group.distributed.size) / slope,
                points=tuple(points),
            )
        )
        group.say(f"{name}: {len(points)} sizes to {points[-1].size_bytes / 2**20:.3g} MiB")
    return tuple(found)


def sizes_to(largest_bytes: int) -> list[int]:
    """From 1 KiB, each four times the one before, to the largest that is not above ``largest_bytes``."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * APART <= largest_bytes:
        sizes.append(sizes[-1] * APART)
    return sizes


def _refusal(group: Group, name: str, dtype: str) -> str:
    """Why a collective cannot be had, by trying it with a few elements; "" where it can."""
    said = ""
    try:
        _Calls(group, name, dtype, SMALLEST_BYTES).by_torch()
        group.synchronize()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        said = str(error).splitlines()[0][:120]
    return next((each for each in group.distributed.allgather(said) if each), "")


def _points(group: Group, name: str, request: BenchRequest, budget_s: float) -> list[Transfer]:
    sizes = sizes_to(request.largest_bytes)
    end_s = group.left_s() - budget_s  # what is left for other collectives
    points: list[Transfer] = []
    for index, size in enumerate(sizes):
        calls = _Calls(group, name, request.dtype, size)
        calls.by_deepspeed()
        tried = [group.timed(calls.by_torch) for _ in range(TRIED)]
        call_s = min(group.slowest(tried)[1:])
        num_calls = max(1, min(MOST_CALLS, int(ROUND_S / call_s)))
        round_s = 2 * num_calls * call_s
        budget_s = group.left_s() - end_s
        if points and AT_A_TIME * round_s > budget_s:
            left_out = ", ".join(f"{each / 2**20:g} MiB" for each in sizes[index:])
            group.notes.append(f"{name}: no time was left for {left_out}")
            break
        points.append(_timed(group, calls, num_calls, end_s + budget_s * (1 - 1 / (len(sizes) - index + 1))))
    return points


def _timed(group: Group, calls: _Calls, num_calls: int, until_left_s: float) -> Transfer:
    """The times of a size: rounds of calls by torch and by DeepSpeed, in turns, until so much time is left."""
    log = _Log()
    own: list[float] = []
    while not own or (len(own) < MOST_ROUNDS and group.left_s() > until_left_s):
        for _ in range(AT_A_TIME):
            own.append(group.timed(lambda: [calls.by_torch() for _ in range(num_calls)]) / num_calls)
            with log:
                group.timed(lambda: [log.alone(calls.by_deepspeed) for _ in range(num_calls)])
    there_and_back = 2 if calls.name == SEND_RECV else 1
    low, median, high = quartiles([each / there_and_back for each in group.slowest(own)])
    logged = log.summary(LOGGED[calls.name])
    theirs_s = sum(each["avg_latency_ms"] for each in logged) / 1000 / there_and_back
    bus = logged[0]["busbw_avg_gbps"] * 1e9 / 8 if len(logged) == 1 else calls.size_bytes / (theirs_s or 1)
    return Transfer(
        size_bytes=calls.size_bytes,
        seconds=median,
        fast_seconds=low,
        slow_seconds=high,
        deepspeed_seconds=theirs_s or None,
        deepspeed_bus_bytes_per_s=bus or None,
    )


class _Log:
    """DeepSpeed's log of communication, which is on while this is entered: each call then waits for its end."""

    def __init__(self) -> None:
        from deepspeed.comm import comm

        self._log: Any = comm.comms_logger
        self._timers: dict[str, Any] = comm.timers.timers
        self._log.reset_data()
        self._log.verbose = False

    def __enter__(self) -> None:
        self._log.enabled = self._log.prof_all = True

    def __exit__(self, *_: object) -> None:
        self._log.enabled = self._log.prof_all = False

    def alone(self, call: Callable[[], object]) -> object:
        """Make a call that is logged with its own time.

        DeepSpeed 0.19.8 logs the sum of all calls so far: ``timed_op`` in ``comm/comm.py`` reads its timer with
        ``reset=False``, and the timer adds up. Here every call has a new one.
        """
        self._timers.clear()
        return call()

    def summary(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """What it says of calls of these names on this rank, of the one size that was called."""
        found = [self._log.get_operation_summary(name) for name in names]
        return [size for each in found if each for size in each.values()]


@dataclass(init=False)
class _Calls:
    """One collective at one size, through torch and through DeepSpeed.

    Args:
        group: Of which all ranks make the same.
        name: Of the collective.
        dtype: Of the elements.
        size_bytes: Of the whole, rounded down to whole elements for each rank.
    """

    by_torch: Callable[[], object]
    by_deepspeed: Callable[[], object]
    name: str
    size_bytes: int

    def __init__(self, group: Group, name: str, dtype: str, size_bytes: int) -> None:
        import deepspeed.comm as theirs

        kind, ranks = getattr(torch, dtype), group.distributed.size
        share = max(1, size_bytes // (kind.itemsize * ranks))
        # Sums of zeros stay zero, however often they are reduced.
        whole = torch.zeros(share * ranks, dtype=kind, device=group.device)
        part = torch.zeros(share, dtype=kind, device=group.device)
        other = torch.empty_like(whole) if name == ALL_TO_ALL else part
        self.name, self.size_bytes = name, whole.numel() * whole.element_size()
        makers: dict[str, Callable[[Any], Callable[[], object]]] = {
            ALL_REDUCE: lambda comm: lambda: comm.all_reduce(whole),
            REDUCE_SCATTER: lambda comm: lambda: comm.reduce_scatter_tensor(part, whole),
            ALL_GATHER: lambda comm: lambda: comm.all_gather_into_tensor(whole, part),
            ALL_TO_ALL: lambda comm: lambda: comm.all_to_all_single(other, whole),
            BROADCAST: lambda comm: lambda: comm.broadcast(whole, 0),
            SEND_RECV: lambda comm: lambda: _there_and_back(comm, whole, group.distributed.rank, ranks - 1),
        }
        self.by_torch, self.by_deepspeed = makers[name](dist), makers[name](theirs)


def _there_and_back(comm: Any, tensor: torch.Tensor, rank: int, last: int) -> None:
    if rank == 0:
        comm.send(tensor, last)
        comm.recv(tensor, last)
    elif rank == last:
        comm.recv(tensor, 0)
        comm.send(tensor, 0)
