"""Figures of a machine that was never measured."""

from __future__ import annotations

from determined_ds.protocol.machine_figures import (
    COLLECTIVES,
    Bandwidth,
    BenchRun,
    Collective,
    Hardware,
    HeldStates,
    Peak,
    TimedCheckpoint,
    TimedStep,
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


def memory() -> MachineFigures:
    strategies = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
    states = tuple(
        HeldStates(
            model=model,
            num_parameters=size,
            strategy=strategy,
            precision="fp32",
            ranks=2,
            state_bytes=None if "offload" in strategy else 16 * size,
            estimated_state_bytes=15 * size,
            peak_bytes=20 * size,
            estimated_peak_bytes=19 * size,
        )
        for model, size in (("6x512", 19_000_000), ("36x1280", 774_000_000))
        for strategy in strategies
    )
    bandwidths = (Bandwidth(place="device", ranks=2, bytes_per_s=3.1e9),)
    return MachineFigures(
        hardware=HARDWARE, measured=(signed("memory"),), states=states, bandwidths=bandwidths
    )


def training() -> MachineFigures:
    steps = tuple(
        TimedStep(
            model=model,
            num_parameters=124_000_000,
            strategy="zero1",
            precision="fp32",
            ranks=2,
            micro_batch_size=samples,
            samples=2 * samples,
            tokens_per_sample=1024,
            step_seconds=0.1 * samples,
            fast_step_seconds=0.09 * samples,
            slow_step_seconds=0.12 * samples,
            flops=1e9 * samples,
        )
        for model in ("12x768", "an_experiment_with_a_long_name: global_batch_size=8")
        for samples in (1, 4, 16, 64)
    )
    peaks = (Peak(precision="fp32", ranks=2, threads=1, flops_per_s=1.86e11),)
    return MachineFigures(hardware=HARDWARE, measured=(signed("training"),), steps=steps, peaks=peaks)


def checkpoint() -> MachineFigures:
    of_disk = TimedCheckpoint(
        storage="run directory",
        strategy="zero1",
        ranks=2,
        size_bytes=2**30,
        write_seconds=2.0,
        stall_seconds=0.5,
        load_seconds=1.5,
        copy_seconds=1.25,
    )
    of_bucket = TimedCheckpoint(
        storage="s3", strategy="zero1", ranks=2, size_bytes=2**30, write_seconds=20.0, load_seconds=15.0
    )
    return MachineFigures(
        hardware=HARDWARE, measured=(signed("checkpoint"),), checkpoints=(of_disk, of_bucket)
    )
