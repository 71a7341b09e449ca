"""A rank of ``det-ds doctor --measure``: python3 -m determined_ds.doctor.measured_rank FOLDER ACCELERATOR SECONDS.

A time is that of the slowest rank: the median of rounds that all ranks begin together, each of as many calls as take a
few milliseconds. Sizes and bandwidths follow nccl-tests: the size is that of the whole (the output of an all-gather,
the input of a reduce-scatter), and the bus bandwidth is size / time, times 2(n-1)/n for all-reduce, (n-1)/n for
reduce-scatter, all-gather and all-to-all, 1 for the others. A send is half of one there and back between the first and
the last rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from determined_ds.devices import detect_accelerator
from determined_ds.doctor.measure import FIGURES
from determined_ds.profile.mfu import peak_flops
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.group.distributed import join_process_group
from determined_ds.train.rank_process import RankProcess, end_process

SMALLEST_BYTES, STEP = 2**10, 8  # each size is so many times the one before
LARGEST_BYTES = {"cpu": 2**25, "cuda": 2**30}
ROUND_S, MOST_CALLS = 0.003, 100
FEWEST_ROUNDS, MOST_ROUNDS = 5, 60
ELEMENT_BYTES = 4
_SHARE = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}


def measured(accelerator: str, seconds: float) -> dict[str, Any]:
    """Measure with the other ranks that the environment describes; see ``measure.py`` for what is returned."""
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that are going to change
    distributed = join_process_group(detect_accelerator(accelerator))
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", distributed.local_rank)
        torch.cuda.set_device(device)
    until = time.monotonic() + seconds

    def left_s() -> float:
        HEART.beat()
        return float(distributed.broadcast(until - time.monotonic()))  # rank 0's clock decides

    def timed(action: Callable[[], object]) -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def slowest(values: list[float]) -> list[float]:
        return [max(each) for each in zip(*distributed.allgather(values), strict=True)]

    dist.barrier()
    own = {
        each: peak_flops(device, each) or 0.0
        for each in ("fp32", "bf16", *(["fp16"] * (accelerator == "cuda")))
    }
    peaks = dict(zip(own, (-each for each in slowest([-each for each in own.values()])), strict=True))
    ranks = int(distributed.size)
    notes: list[str] = []
    unfinished: list[str] = []
    collectives: dict[str, list[dict[str, float]]] = {}
    for number, name in enumerate(COLLECTIVES if ranks > 1 else ()):
        end_s = left_s() * (1 - 1 / (len(COLLECTIVES) - number))  # what is left for the other collectives
        points = collectives.setdefault(name, [])
        num_bytes = SMALLEST_BYTES
        while num_bytes <= LARGEST_BYTES[device.type]:
            call, size = _call(name, num_bytes, ranks, distributed.rank, device)
            refusal = ""
            try:
                call()
            except (RuntimeError, NotImplementedError, ValueError) as error:
                refusal = str(error).splitlines()[0][:120]
            if refused := next(filter(None, distributed.allgather(refusal)), ""):
                notes.append(f"{name} is not offered by {dist.get_backend()}: {refused}")
                break
            [_, call_s] = slowest([timed(call), timed(call)])
            calls = max(1, min(MOST_CALLS, int(ROUND_S / call_s)))
            if points and FEWEST_ROUNDS * calls * call_s > left_s() - end_s:
                unfinished.append(name)
                break
            rounds: list[float] = []
            share_s = (left_s() - end_s) / 2  # of the sizes that are left, the largest takes longest
            stop_s = left_s() - share_s
            while len(rounds) < FEWEST_ROUNDS or (len(rounds) < MOST_ROUNDS and left_s() > stop_s):
                rounds += [timed(partial(_repeat, call, calls)) / calls for _ in range(FEWEST_ROUNDS)]
            ways = 2 if name == "send_recv" else 1
            times = [each / ways for each in slowest(rounds)]
            low, median, high = statistics.quantiles(times, n=4, method="inclusive")
            bus = _SHARE[name] * (ranks - 1) / ranks if name in _SHARE else 1.0
            points.append(
                {"bytes": size, "s": median, "low_s": low, "high_s": high, "bytes_per_s": bus * size / median}
            )
            num_bytes *= STEP
    if unfinished:
        notes.append(f"no time was left for the larger sizes of {', '.join(unfinished)}; give more --seconds")
    distributed.allgather(None)  # none ends while another needs it
    return {
        "ranks": ranks,
        "machines": int(distributed.cross_size),
        "backend": str(dist.get_backend()),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "peaks": peaks,
        "collectives": {name: points for name, points in collectives.items() if points},
        "notes": notes,
    }


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")


def _call(
    name: str, num_bytes: int, ranks: int, rank: int, device: torch.device
) -> tuple[Callable[[], object], int]:
    """One collective at one size, rounded to whole elements for each rank; and that size in bytes."""
    share = max(1, num_bytes // (ELEMENT_BYTES * ranks))
    whole = torch.zeros(
        share * ranks, device=device
    )  # sums of zeros stay zero, however often they are reduced
    part, other = torch.zeros(share, device=device), torch.empty_like(whole)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, ranks - 1)
            dist.recv(whole, ranks - 1)
        elif rank == ranks - 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": there_and_back,
    }
    return calls[name], whole.numel() * ELEMENT_BYTES


def main(argv: list[str]) -> int:
    """Measure as one rank; rank 0 writes the figures into the folder. Returns the exit code."""
    folder, accelerator, seconds = Path(argv[0]), argv[1], float(argv[2])

    def work() -> None:
        figures = measured(accelerator, seconds)
        if dist.get_rank() == 0:
            (folder / FIGURES).write_text(json.dumps(figures))

    return RankProcess(folder).run(work, exit_of=lambda _: None)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
