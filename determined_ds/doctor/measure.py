"""``det-ds doctor --measure``: what the ranks of this machine, or of this task, reach. Loads no torch.

The ranks are started as ``det-ds run`` starts them; under another launcher this process is one of them. Each measures
by ``measured_rank.py``, and rank 0 hands back the figures as plain data::

    {"ranks": 2, "machines": 1, "backend": "gloo", "threads": 1, "notes": [...],
     "peaks": {"fp32": 1.8e11},                                            operations a second of a rank
     "collectives": {"all_reduce": [{"bytes": 1024, "s": 1e-4, "bytes_per_s": 1e7, "low_s": ..., "high_s": ...}]}}
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from determined_ds.devices import detect_accelerator, detect_without_torch
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED, ConfigError, Problem, TrainingError
from determined_ds.launch.external import take_threads
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.outcome import show_failure
from determined_ds.launch.placement import placement_here
from determined_ds.launch.ranks import Ranks, environment_of_ranks
from determined_ds.memory.units import format_bytes
from determined_ds.report.table import terminal_width
from determined_ds.rundir.handed_on import LAUNCHED_BY, count
from determined_ds.rundir.run_dir import RunDir

CPU_SLOTS = 2
FIGURES = "figures.json"  # of rank 0, in the folder of the ranks
# Beside the time that is asked for: starting, and a machine that is busy with something else.
START_S, SLOWER = 300.0, 4.0


def measure(*, slots: int | None, accelerator: str | None, seconds: float, as_json: bool) -> int:
    """Measure matrix products, and collectives by size, on this machine or in this task; print the figures.

    Args:
        slots: Ranks; None: one a GPU, two on a CPU, or as many as another launcher has started.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
        seconds: How long it may take once the ranks have met.
        as_json: Print the figures as one JSON object.

    Returns:
        The exit code; above 0, why it failed has been printed.

    Raises:
        ConfigError: there is no such device, or no room for so many ranks.
        TrainingError: the ranks took far longer than they may.
    """
    placed = placement_here()
    device = detect_without_torch(accelerator) or detect_accelerator(accelerator)
    size = slots or (placed.size if placed else device.num_devices if device.name == "cuda" else CPU_SLOTS)
    if placed is not None and size != placed.size:
        message, fix = f"{placed.launcher} has started {count(placed.size, 'rank')}", "leave --slots out"
        raise ConfigError(Problem(key="--slots", value=size, message=message, fix=fix, code="slots"))
    if placed is None and size > device.max_ranks:
        kind = "GPU" if device.name == "cuda" else "CPU core"
        message = f"this machine has {count(device.num_devices, kind)}, enough for {count(device.max_ranks, 'rank')}"
        fix = f"use --slots {device.max_ranks} or fewer"
        raise ConfigError(Problem(key="--slots", value=size, message=message, fix=fix, code="slots"))
    if placed is not None:
        take_threads(placed)
        os.environ.update(environment_of_ranks(placed.local_size, device, Path.cwd(), {}))
        os.environ.update({**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"})
        from determined_ds.doctor.measured_rank import measured

        figures = measured(device.name, seconds)
        if placed.rank == 0:
            _show(figures, as_json)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of the process group may wait for a peer that is gone
    folder = Path(tempfile.mkdtemp(prefix="det_ds_measure_"))
    (folder / "logs").mkdir()
    words = [
        sys.executable,
        "-m",
        "determined_ds.doctor.measured_rank",
        str(folder),
        device.name,
        str(seconds),
    ]
    environment = environment_of_ranks(size, device, Path.cwd(), {})
    ranks = Ranks(
        words, size=size, environment=environment, cwd=Path.cwd(), run_dir=RunDir(folder), keep_open=()
    )
    until = time.monotonic() + START_S + SLOWER * seconds
    with Interrupts("ending the measurement") as interrupts, ranks:
        failures = ranks.wait(
            lambda: ranks.kill() if interrupts.requested or time.monotonic() > until else None
        )
    if failures and not interrupts.requested:  # their output is left where the message says
        if time.monotonic() > until:
            allowed_s = START_S + SLOWER * seconds
            raise TrainingError(
                f"the ranks have not ended within {allowed_s:.0f} s; their output is in {folder}/logs"
            )
        show_failure(failures[0], RunDir(folder))
        return EXIT_CONFIG if failures[0].exit_code == EXIT_CONFIG else EXIT_TRAINING_FAILED
    if not interrupts.requested:
        _show(json.loads((folder / FIGURES).read_text()), as_json)
    shutil.rmtree(folder, ignore_errors=True)
    return 128 + interrupts.signals[0] if interrupts.requested else 0


def _show(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"version": 1, **figures}))
        return
    console = Console(width=terminal_width(), highlight=False)
    where = f"{count(figures['ranks'], 'rank')} on {count(figures['machines'], 'machine')}"
    threads = f", {count(figures['threads'], 'thread')} each" if figures["threads"] else ""
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in figures["peaks"].items())
    console.print(f"{where}{threads}\nmatrix products of a rank, while all compute: {peaks}")
    collectives: dict[str, list[dict[str, float]]] = figures["collectives"]
    sizes = sorted({int(each["bytes"]) for points in collectives.values() for each in points})
    quantities = (("ms", "s", 1e3), ("GB/s of bus bandwidth", "bytes_per_s", 1e-9)) if collectives else ()
    for title, key, factor in quantities:
        table = Table(title=f"{figures['backend']}, float32: {title}", title_justify="left", box=None)
        table.add_column("", justify="right")
        for name in collectives:
            table.add_column(name.replace("_", " "), justify="right")
        for size in sizes:
            found = [
                {each["bytes"]: each[key] * factor for each in points} for points in collectives.values()
            ]
            table.add_row(
                format_bytes(size), *(f"{each[size]:.3g}" if size in each else "" for each in found)
            )
        console.print(table)
    for note in figures["notes"]:
        console.print(f"note: {note}")
