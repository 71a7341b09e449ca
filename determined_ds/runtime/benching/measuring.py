"""One measurement, in every rank: meet, measure, and sign."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import platform
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from determined_ds.devices import detect_accelerator, hardware_here
from determined_ds.protocol.machine_figures import COMMUNICATION, MEMORY, TRAINING, BenchRun
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.timing import Group, join

PACKAGES = ("torch", "deepspeed", "determined-ds")


def measure(request: BenchRequest, *, say: Callable[[str], None]) -> MachineFigures | None:
    """Measure with the other ranks that the environment describes.

    Args:
        request: What.
        say: Shows a line of progress, on rank 0.

    Returns:
        What was measured, on rank 0; None on the others.

    Raises:
        ConfigError: the request cannot be measured here.
    """
    started = time.monotonic()
    group = join(request.accelerator, request.seconds, say)
    measured = _of_kind(group, request)
    group.distributed.allgather(None)  # none ends while another needs it
    return figures_signed(group, request, time.monotonic() - started, **measured)


def figures_signed(
    group: Group, request: BenchRequest, wall_seconds: float, **measured: Any
) -> MachineFigures | None:
    """What was measured with when, where and with what, on rank 0; None on the others.

    Args:
        group: The ranks that measured.
        request: What.
        wall_seconds: How long it took.
        measured: The figures by the fields of :class:`MachineFigures`.
    """
    if not group.is_chief:
        return None
    signed = BenchRun(
        bench=request.bench,
        when=datetime.now().isoformat(timespec="seconds"),
        command=request.command,
        hostname=socket.gethostname(),
        ranks=group.distributed.size,
        versions=(
            f"Python {platform.python_version()}",
            *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
        ),
        wall_seconds=round(wall_seconds, 1),
        notes=tuple(group.notes),
    )
    hardware = hardware_here(detect_accelerator(request.accelerator))
    return dataclasses.replace(MachineFigures(hardware=hardware, measured=(signed,)), **measured)


def _of_kind(group: Group, request: BenchRequest) -> dict[str, Any]:
    """The figures by the fields of :class:`MachineFigures`; only the module of the requested kind is loaded."""
    if request.bench == COMMUNICATION:
        from determined_ds.runtime.benching.bench_communication import measure_communication

        return {"collectives": measure_communication(group, request)}
    if request.bench == MEMORY:
        from determined_ds.runtime.benching.bench_memory import measure_memory

        states, bandwidths = measure_memory(group, request)
        return {"states": states, "bandwidths": bandwidths}
    if request.bench == TRAINING:
        from determined_ds.runtime.benching.bench_training import measure_training

        steps, peaks = measure_training(group, request)
        return {"steps": steps, "peaks": peaks}
    raise NotImplementedError(request.bench)
