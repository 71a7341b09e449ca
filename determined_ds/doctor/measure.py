"""``det-ds doctor --measure``: what the ranks of this machine, or of this task, reach.

torchrun starts the ranks; under another launcher this process is one of them. A time is that of the slowest rank: the
median of rounds that all ranks begin together, each of as many calls as take a few milliseconds. Sizes and bandwidths
follow nccl-tests: the size is that of the whole (the output of an all-gather, the input of a reduce-scatter), and the
bus bandwidth is size / time, times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all, 1
for the others. A send is half of one there and back between the first and the last rank. torch is loaded by ranks
alone.
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
ELEMENT_BYTES = 4


def measure(*, slots: int | None, accelerator: str | None, seconds: float) -> int:
    """Measure matrix products, and collectives by size, on this machine or in this task; print the figures.

    Args:
        slots: Ranks; None: one a GPU, two on a CPU, or as many as another launcher has started.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
        seconds: How long the collectives may take once the ranks have met.

    Returns:
        The exit code; above 0, why it failed has been printed.

    Raises:
        ConfigError: there is no such device, or no room for so many ranks.
    """
    placed = placement_here()
    device = detect_without_torch(accelerator) or detect_accelerator(accelerator)
    if placed is None:
        size = slots or (device.num_devices if device.name == "cuda" else CPU_SLOTS)
        if size > device.max_ranks:
            message = f"this machine has room for {count(device.max_ranks, 'rank')}"
            fix = f"use --slots {device.max_ranks} or fewer"
            raise ConfigError(Problem(key="--slots", value=size, message=message, fix=fix, code="slots"))
        words = [*TORCHRUN, str(size), "-m", "determined_ds.cli", "doctor", "--measure"]
        words += ["--accelerator", device.name, "--seconds", str(seconds)]
        environment = {"COLUMNS": str(terminal_width()), **environment_of_ranks(size, device, Path.cwd(), {})}
        return subprocess.run(words, env=environment).returncode
    if slots not in (None, placed.size):
        message = f"{placed.launcher} has started {count(placed.size, 'rank')}"
        raise ConfigError(Problem(key="--slots", value=slots, message=message, fix="leave --slots out"))
    take_threads(placed)
    os.environ.update(environment_of_ranks(placed.local_size, device, Path.cwd(), {}))
    os.environ.update({**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"})
    _measure_as_rank(device.name, seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the process group may wait for a peer that is gone


def _measure_as_rank(accelerator: str, seconds: float) -> None:
    """Measure with the other ranks that the environment describes; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from determined_ds.profile.mfu import peak_flops
    from determined_ds.train.group.process_group import join_process_group

    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that are going to change
    distributed = join_process_group(detect_accelerator(accelerator))
    ranks, rank = int(distributed.size), int(distributed.rank)
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", distributed.local_rank)
        torch.cuda.set_device(device)

    def timed(call: Callable[[], object], calls: int = 1) -> float:
        """Seconds of a call, by the slowest rank."""
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return float(max(distributed.allgather((time.perf_counter() - started) / calls)))

    def collective(name: str, num_bytes: int) -> tuple[Callable[[], object], int]:
        """One at one size, rounded to whole elements for each rank; and that size in bytes."""
        share = max(1, num_bytes // (ELEMENT_BYTES * ranks))
        # Sums of zeros stay zero, however often they are reduced.
        whole, part = torch.zeros(share * ranks, device=device), torch.zeros(share, device=device)
        other = torch.empty_like(whole)

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

    dist.barrier()
    kinds = ["fp32", "bf16", *(["fp16"] * (accelerator == "cuda"))]
    peaks = [min(distributed.allgather(peak_flops(device, kind) or 0.0)) for kind in kinds]
    sizes = SIZES[device.type]
    found: dict[tuple[str, int], tuple[float, float]] = {}  # ms, and GB/s of bus bandwidth
    unfinished: list[str] = []
    for name in COLLECTIVES if ranks > 1 else ():
        until = time.monotonic() + seconds / len(COLLECTIVES)
        bus = {"all_reduce": 2.0}.get(name, 1.0) * (ranks - 1) / ranks
        bus = 1.0 if name in ("broadcast", "send_recv") else bus
        for num_bytes in sizes:
            HEART.beat()
            call, size = collective(name, num_bytes)
            timed(call)  # the first call prepares
            call_s = timed(call)
            calls = max(1, min(MOST_CALLS, int(ROUND_S / call_s)))
            left_s = float(distributed.broadcast(until - time.monotonic()))  # rank 0's clock decides
            if num_bytes > sizes[0] and ROUNDS * calls * call_s > left_s:
                unfinished.append(name)
                break
            median = statistics.median(timed(call, calls) for _ in range(ROUNDS))
            median /= 2 if name == "send_recv" else 1
            found[name, num_bytes] = 1e3 * median, 1e-9 * bus * size / median
    distributed.allgather(None)  # none ends while another needs it
    if rank != 0:
        return
    console = Console(width=terminal_width(), highlight=False)
    threads = f", {count(torch.get_num_threads(), 'thread')} each" if device.type == "cpu" else ""
    console.print(f"{count(ranks, 'rank')} on {count(int(distributed.cross_size), 'machine')}{threads}")
    products = ", ".join(f"{kind} {peak / 1e9:,.0f} GFLOP/s" for kind, peak in zip(kinds, peaks, strict=True))
    console.print(f"matrix products of a rank, while all compute: {products}")
    for index, title in enumerate(("ms", "GB/s of bus bandwidth")) if found else ():
        heads = [Column(""), *(Column(name.replace("_", " "), justify="right") for name in COLLECTIVES)]
        table = Table(*heads, box=None, title_justify="left", title=f"{dist.get_backend()}, float32: {title}")
        for size in sizes:
            times = [found.get((name, size)) for name in COLLECTIVES]
            if any(times):
                table.add_row(format_bytes(size), *(f"{each[index]:.3g}" if each else "" for each in times))
        console.print(table)
    if unfinished:
        console.print(f"note: no time for the larger sizes of {', '.join(unfinished)}; give more --seconds")
