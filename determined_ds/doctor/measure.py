"""``det-ds doctor --measure``: what the ranks of this machine, or of this task, reach.

torchrun starts the ranks; under another launcher this process is one of them. A time is that of the slowest rank: the
median of rounds that all ranks begin together. Sizes and bandwidths follow nccl-tests: the size is that of the whole
(the output of an all-gather, the input of a reduce-scatter), and the bus bandwidth is size / time, times 2(n-1)/n for
all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all, 1 for the others. A send is half of one there and
back between the first and the last rank. torch is loaded by ranks alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from determined_ds.devices import detect_accelerator, detect_without_torch
from determined_ds.errors import ConfigError, Problem
from determined_ds.launch.external import take_threads
from determined_ds.launch.placement import placement_here
from determined_ds.launch.ranks import environment_of_ranks
from determined_ds.memory.units import format_bytes
from determined_ds.report.numbers import count, terminal_width
from determined_ds.rundir.handed_on import LAUNCHED_BY
from determined_ds.rundir.signals import HEART

CPU_SLOTS = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
SIZES = {"cpu": [2**10 * 8**step for step in range(6)], "cuda": [2**10 * 8**step for step in range(7)]}
ROUNDS, ROUND_S, MOST_CALLS = 15, 0.003, 100
MOST_S = 2.0  # of one collective at one size, as far as that can be
ELEMENT_BYTES = 4


def measure(*, slots: int | None, accelerator: str | None) -> int:
    """Measure matrix products, and collectives by size, on this machine or in this task. Returns the exit code."""
    placed = placement_here()
    device = detect_without_torch(accelerator) or detect_accelerator(accelerator)
    if placed is None:
        size = slots or (device.num_devices if device.name == "cuda" else CPU_SLOTS)
        if size > device.max_ranks:
            message = f"this machine has room for {count(device.max_ranks, 'rank')}"
            fix = f"use --slots {device.max_ranks} or fewer"
            raise ConfigError(Problem(key="--slots", value=size, message=message, fix=fix, code="slots"))
        words = [*TORCHRUN, str(size), "-m", "determined_ds.cli", "doctor", "--measure"]
        environment = {"COLUMNS": str(terminal_width()), **environment_of_ranks(size, device, Path.cwd(), {})}
        return subprocess.run([*words, "--accelerator", device.name], env=environment).returncode
    if slots not in (None, placed.size):
        message = f"{placed.launcher} has started {count(placed.size, 'rank')}"
        raise ConfigError(Problem(key="--slots", value=slots, message=message, fix="leave --slots out"))
    take_threads(placed)
    os.environ.update(environment_of_ranks(placed.local_size, device, Path.cwd(), {}))
    os.environ.update({**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"})
    _measure_as_rank(device.name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the process group may wait for a peer that is gone


def _measure_as_rank(accelerator: str) -> None:
    """Measure with the other ranks that the environment describes; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from determined_ds.profile.mfu import peak_flops
    from determined_ds.train.group.process_group import join_process_group

    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that are going to change
    distributed = join_process_group(detect_accelerator(accelerator))
    ranks, rank = int(distributed.size), int(distributed.rank)
    device = torch.device(accelerator, distributed.local_rank if accelerator == "cuda" else 0)
    if accelerator == "cuda":
        torch.cuda.set_device(device)

    def timed(call: Callable[[], object], calls: int = 1) -> float:
        """Seconds of a call, by the slowest rank."""
        HEART.beat()
        dist.barrier()
        torch.cuda.synchronize() if device.type == "cuda" else None
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize() if device.type == "cuda" else None
        return float(max(distributed.allgather((time.perf_counter() - started) / calls)))

    def median_s(name: str, elements: int) -> float:
        """Seconds of one collective, each rank with an equal part of so many elements."""
        # Sums of zeros stay zero, however often they are reduced.
        whole, part = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
        other = torch.empty_like(whole)
        there, back = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        peer = {0: ranks - 1, ranks - 1: 0}.get(rank)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "send_recv": lambda: peer is None or (there(whole, peer), back(whole, peer)),
        }
        timed(calls[name])  # the first call prepares
        call_s = timed(calls[name])
        in_round = max(1, min(MOST_CALLS, int(ROUND_S / call_s)))
        rounds = max(1, min(ROUNDS, int(MOST_S / (in_round * call_s))))
        median = statistics.median(timed(calls[name], in_round) for _ in range(rounds))
        return median / 2 if name == "send_recv" else median

    dist.barrier()
    kinds = ["fp32", "bf16", *(["fp16"] * (accelerator == "cuda"))]
    peaks = [min(distributed.allgather(peak_flops(device, kind) or 0.0)) for kind in kinds]
    share = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * share, "broadcast": 1, "send_recv": 1}
    tables = []
    for title in ("ms", "GB/s of bus bandwidth"):
        heads = [Column(""), *(Column(name.replace("_", " "), justify="right") for name in COLLECTIVES)]
        title = f"{dist.get_backend()}, float32: {title}"
        tables.append(Table(*heads, box=None, title_justify="left", title=title))
    for num_bytes in SIZES[device.type] if ranks > 1 else ():
        size = max(1, num_bytes // (ELEMENT_BYTES * ranks)) * ranks * ELEMENT_BYTES
        times_s = [median_s(name, size // ELEMENT_BYTES) for name in COLLECTIVES]
        tables[0].add_row(format_bytes(num_bytes), *(f"{1e3 * time_s:.3g}" for time_s in times_s))
        bus = [
            size * shares.get(name, share) / time_s for name, time_s in zip(COLLECTIVES, times_s, strict=True)
        ]
        tables[1].add_row(format_bytes(num_bytes), *(f"{1e-9 * each:.3g}" for each in bus))
    distributed.allgather(None)  # none ends while another needs it
    if rank != 0:
        return
    console = Console(width=terminal_width(), highlight=False)
    threads = f", {count(torch.get_num_threads(), 'thread')} each" if device.type == "cpu" else ""
    console.print(f"{count(ranks, 'rank')} on {count(int(distributed.cross_size), 'machine')}{threads}")
    products = ", ".join(f"{kind} {peak / 1e9:,.0f} GFLOP/s" for kind, peak in zip(kinds, peaks, strict=True))
    console.print(f"matrix products of a rank, while all compute: {products}")
    for table in tables if ranks > 1 else ():
        console.print(table)
