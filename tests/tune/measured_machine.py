"""A machine that was measured: figures as ``det-ds bench`` writes them, of round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.devices import detect_accelerator, hardware_here
from determined_ds.protocol.machine_figures import (
    ALL_GATHER,
    ALL_REDUCE,
    DEVICE,
    REDUCE_SCATTER,
    SEND_RECV,
    Bandwidth,
    BenchRun,
    Collective,
    Hardware,
    Peak,
    TimedCheckpoint,
    TimedStep,
)
from determined_ds.protocol.machine_file import MachineFigures, write_machine

FLOPS, LATENCY_S, BUS, MEMORY, WRITES = 1e10, 1e-3, 1e9, 2e10, 5e8  # of a rank; of writes, of all ranks
GPUS = Hardware(accelerator="cuda", device="H", num_devices=8, cores=64, host_memory_bytes=2**40)


def machine(hardware: Hardware | None = None, **others: Any) -> MachineFigures:
    """Of this machine's CPU, unless of another: training in fp32 reaches 10 GFLOP/s, links 1 GB/s after 1 ms."""
    hardware = hardware or hardware_here(detect_accelerator("cpu"))
    run = BenchRun(
        bench="training",
        when="2026-11-23T10:00:00",
        command="",
        hostname="h",
        ranks=2,
        versions=(),
        wall_seconds=1,
    )
    step = TimedStep(
        model="gpt2",
        num_parameters=10**6,
        strategy="zero0",
        precision="fp32",
        ranks=2,
        micro_batch_size=16,
        samples=32,
        tokens_per_sample=128,
        step_seconds=1.0,
        fast_step_seconds=1.0,
        slow_step_seconds=1.0,
        flops=2 * FLOPS,
    )
    fields: dict[str, Any] = {
        "measured": (run,),
        "collectives": tuple(
            Collective(
                name=name,
                ranks=2,
                machines=1,
                backend="gloo",
                dtype="float32",
                latency_s=LATENCY_S,
                bus_bytes_per_s=BUS,
                points=(),
            )
            for name in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND_RECV)
        ),
        "peaks": (Peak(precision="fp32", ranks=2, threads=1, flops_per_s=4 * FLOPS),),
        "bandwidths": (Bandwidth(place=DEVICE, ranks=2, bytes_per_s=MEMORY),),
        "steps": (step,),
        "checkpoints": (
            TimedCheckpoint(
                storage="run directory",
                strategy="zero1",
                ranks=2,
                size_bytes=int(WRITES),
                write_seconds=1.0,
                load_seconds=1.0,
            ),
        ),
    }
    return MachineFigures(hardware=hardware, **{**fields, **others})


def written(path: Path, figures: MachineFigures | None = None) -> Path:
    """``machine.json`` of it."""
    write_machine(path, figures or machine())
    return path
