"""A measurement in ranks: started here, or this process as one of another launcher's. Loads no torch here.

Ours are processes of ``determined_ds.runtime.benching.bench_rank``; their rank 0 leaves its figures in the run
directory. Under another launcher this process is a rank itself.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from determined_ds.bench.plan import BenchPlace
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED, TrainingError
from determined_ds.launch.external.as_rank import take_threads
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.ranks.failures import show_failure
from determined_ds.launch.ranks.group import Ranks
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import environment_of_ranks
from determined_ds.protocol.handed_on import LAUNCHED_BY
from determined_ds.protocol.machine_file import NAME, MachineFigures, read_machine
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.run_lock import RunLock
from determined_ds.runtime.benching.bench_request import BenchRequest

MODULE = "determined_ds.runtime.benching.bench_rank"
# Beside the time that is requested: starting, compiling, and a machine that is busy with something else.
START_S, SLOWER = 300.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a measurement ended.

    Args:
        machine: What was measured; None where nothing was, or on a rank other than 0.
        code: Exit code of the command.
    """

    machine: MachineFigures | None = None
    code: int = 0


def measure_in_ranks(where: BenchPlace, request: BenchRequest) -> Ended:
    """Measure; why it failed is shown.

    Raises:
        ConfigError: the run directory is in use.
        TrainingError: the ranks took far longer than they may.
    """
    if where.placed is not None:
        return _as_rank(where, request)
    with RunLock(where.run_dir) as lock:
        there = RunDir(where.run_dir)
        there.logs.mkdir(exist_ok=True)
        (there.path / NAME).unlink(missing_ok=True)
        here = Path.cwd()
        ranks = Ranks(
            [sys.executable, "-m", MODULE, "--run-dir", str(there.path), "--request", request.to_text()],
            size=where.slots,
            environment=environment_of_ranks(where.slots, where.accelerator, here, {}),
            cwd=here,
            run_dir=there,
            keep_open=[lock.fileno()],
        )
        return _followed(ranks, there, START_S + SLOWER * request.seconds)


def _followed(ranks: Ranks, there: RunDir, most_s: float) -> Ended:
    until = time.monotonic() + most_s
    with Interrupts("ending the measurement; nothing of it is kept") as interrupts, ranks:

        def look() -> None:
            if interrupts.requested or time.monotonic() > until:
                ranks.kill()

        failures = ranks.wait(look)
    if interrupts.requested:
        return Ended(code=128 + interrupts.signals[0])
    if failures and time.monotonic() > until:
        raise TrainingError(
            f"the ranks have not ended within {most_s:.0f} s; their output is in {there.logs}"
        )
    if failures:
        show_failure(failures[0], there)
        return Ended(code=_code(failures[0]))
    return Ended(machine=read_machine(there.path / NAME))


def _code(failure: Failure) -> int:
    return EXIT_CONFIG if failure.exit_code == EXIT_CONFIG else EXIT_TRAINING_FAILED


def _as_rank(where: BenchPlace, request: BenchRequest) -> Ended:
    """Be one of another launcher's ranks. Torch is not loaded yet, and finds what it needs in the environment."""
    placed = where.placed
    assert placed is not None
    take_threads(placed)
    os.environ.update(environment_of_ranks(placed.local_size, where.accelerator, Path.cwd(), {}))
    os.environ.update({**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"})
    from determined_ds.runtime.benching.measuring import measure

    return Ended(machine=measure(request, say=lambda line: print(f"  {line}", file=sys.stderr, flush=True)))
