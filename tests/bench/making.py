"""Figures of a machine that was never measured."""

from __future__ import annotations

from determined_ds.protocol.machine_figures import (
    COLLECTIVES,
    BenchRun,
    Collective,
    Hardware,
    Transfer,
    bus_factor,
)
from determined_ds.protocol.machine_file import MachineFigures

HARDWARE = Hardware(accelerator="cpu", device="A CPU", num_devices=2, cores=2, host_memory_bytes=2**34)


def signed(bench: str, *notes: str) -> BenchRun:
    return BenchRun(
        bench=bench,
        when="2026-01-02T03:04:05",
        command=f"det-ds bench {bench}",
        hostname="here",
        ranks=2,
        versions=("torch 2.13.0",),
        wall_seconds=9.5,
        notes=notes,
    )


def collective(name: str) -> Collective:
    factor = bus_factor(name, 2)
    return Collective(
        name=name,
        ranks=2,
        machines=1,
        backend="gloo",
        dtype="float32",
        latency_s=1e-4,
        bus_bytes_per_s=1e9,
        points=tuple(
            Transfer(
                size_bytes=4**power,
                seconds=1e-4 + factor * 4**power / 1e9,
                fast_seconds=0.9e-4 + factor * 4**power / 1e9,
                slow_seconds=2e-4 + factor * 4**power / 1e9,
                deepspeed_seconds=1.1e-4 + factor * 4**power / 1e9,
                deepspeed_bus_bytes_per_s=9e8,
            )
            for power in range(5, 16)
        ),
    )


def communication() -> MachineFigures:
    note = (
        "all_to_all is not offered by gloo: a reason that is long enough to be wrapped over more than a line"
    )
    return MachineFigures(
        hardware=HARDWARE,
        measured=(signed("communication", note),),
        collectives=tuple(collective(name) for name in COLLECTIVES),
    )
