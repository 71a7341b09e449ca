"""What checkpoints cost: written at once, while training continues, read back; beside a plain copy of their files.

By the code that training writes them with, after a step that gives the optimizer its states. In turns, so that a disk
that gets slower favours none; what was written is deleted.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError
from determined_ds.protocol.machine_figures import TimedCheckpoint
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.measuring import figures_signed
from determined_ds.runtime.benching.timing import Group
from determined_ds.runtime.checkpoints.saving import Checkpoints
from determined_ds.runtime.checkpoints.stored_elsewhere import StoredElsewhere
from determined_ds.runtime.checkpoints.trial_state import TrialState
from determined_ds.runtime.loop.measured_loop import measure_throughput

RUN_DIR = "run directory"
FEWEST, MOST = 2, 8  # turns, after one that makes the buffers
WRITE, STALL, LOAD, COPY = "write", "stall", "load", "copy"


def time_checkpoints(
    trial: Any, context: Any, request: BenchRequest, *, run_dir: Path
) -> MachineFigures | None:
    """Write and read checkpoints of a trial.

    Args:
        trial: Its engines are wrapped; the weights change by one step.
        context: Its core context stores the files.
        request: For how long; whether it is the experiment's storage.
        run_dir: Of the run.

    Returns:
        What was measured, on rank 0; None on the others.

    Raises:
        CheckpointError: there is no room for one, or one cannot be written or read.
    """
    group = Group(
        distributed=context.distributed,
        device=context.device,
        until=time.monotonic() + request.seconds,
        say=(lambda line: print(f"  {line}", flush=True))
        if context.distributed.rank == 0
        else lambda _: None,
    )
    started = time.monotonic()
    measure_throughput(trial, context, steps=1, warmup=0)
    turns = _Turns(group, trial, context, run_dir)
    found = turns.measure()
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    stored = context.get_experiment_config().get("checkpoint_storage") or {}
    figure = TimedCheckpoint(
        storage=str(stored.get("type")) if request.storage else RUN_DIR,
        strategy=f"zero{context.resolved.strategy.zero_stage}",
        ranks=group.distributed.size,
        size_bytes=turns.size_bytes,
        write_seconds=medians[WRITE],
        stall_seconds=medians.get(STALL),
        load_seconds=medians[LOAD],
        copy_seconds=medians.get(COPY),
    )
    return figures_signed(group, request, time.monotonic() - started, checkpoints=(figure,))


class _Turns:
    """One checkpoint after the other."""

    def __init__(self, group: Group, trial: Any, context: Any, run_dir: Path) -> None:
        self._group = group
        self._context = context
        self._folder = run_dir / "checkpoints"
        self._checkpoints = Checkpoints(trial, context, {}, {}, note=lambda _: None)
        self._state = TrialState()
        self._is_local = not isinstance(context._core.checkpoint, StoredElsewhere)
        self.size_bytes = 0

    def measure(self) -> dict[str, list[float]]:
        """Seconds of each thing, a figure a turn: the slowest rank's."""
        goes_aside = self._prepare()
        seconds: dict[str, list[float]] = {name: [] for name in (WRITE, STALL, LOAD, COPY)}
        for turn in range(MOST + 1):
            if turn > FEWEST and self._group.left_s() <= 0:
                break
            found = self._turn(goes_aside)
            if turn:  # the first makes the buffers
                for name, value in found.items():
                    seconds[name].append(value)
                self._group.say(
                    f"turn {turn}: " + ", ".join(f"{name} {value:.2f} s" for name, value in found.items())
                )
        return seconds

    def _prepare(self) -> bool:
        """Whether checkpoints can be written while training continues."""
        try:
            self._checkpoints.prepare(True)
        except ConfigError as error:  # on all ranks
            self._group.notes.append(f"written while training continues: {error.problems[0].message}")
            return False
        return True

    def _turn(self, goes_aside: bool) -> dict[str, float]:
        state = self._state
        state.batches_trained += 1
        found = {WRITE: self._timed(lambda: self._checkpoints.save(state))}
        written = state.kept[-1]
        if not self.size_bytes:
            with self._context._core.checkpoint.restore_path(written) as path:
                files = [file for file in Path(path).rglob("*") if file.is_file()]
                self.size_bytes = sum(file.stat().st_size for file in files)
        self._forget(written)
        found[LOAD] = self._timed(lambda: self._checkpoints.load(written, trial_id=0))
        if goes_aside:
            state.batches_trained += 1
            found[STALL] = self._timed(lambda: self._checkpoints.save(state, waits=False))
            self._checkpoints.finish()
        if self._is_local:
            self._forget(written)
            found[COPY] = self._timed(lambda: self._copy(written))
        self._delete(written, state.kept[-1])
        return found

    def _timed(self, action: Callable[[], object]) -> float:
        [seconds] = self._group.slowest([self._group.timed(action)])
        return seconds

    def _forget(self, uuid: str) -> None:
        """Have the system read the files from the disk again, and not from memory; where it can be asked to."""
        if self._group.is_chief and self._is_local and hasattr(os, "posix_fadvise"):
            for file in [file for file in (self._folder / uuid).rglob("*") if file.is_file()]:
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def _copy(self, uuid: str) -> None:
        """Copy the files to the same disk, on rank 0."""
        if not self._group.is_chief:
            return
        target = self._folder / ".copy"
        shutil.copytree(self._folder / uuid, target)
        for file in target.rglob("*"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _delete(self, *uuids: str) -> None:
        if self._group.is_chief:
            shutil.rmtree(self._folder / ".copy", ignore_errors=True)
            for uuid in dict.fromkeys(uuids):
                self._context._core.checkpoint.delete(uuid)
        self._state.kept.clear()
        self._group.distributed.allgather(None)
