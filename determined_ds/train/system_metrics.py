"""Determined's system metrics off-cluster: what its profiler sends to a master, in a file."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from determined import core
from determined.core import _profiler

from determined_ds.rundir.metrics_file import append_record
from determined_ds.rundir.run_dir import RunDir

logger = logging.getLogger("determined_ds")

COLLECTORS: tuple[Callable[[], Any], ...] = (
    _profiler._CPU,
    _profiler._Memory,
    _profiler._Disk,
    _profiler._Network,
    *((_profiler._GPU,) if _profiler.pynvml is not None else ()),
)
# Minimum between two samples: rates over less are noise.
LEAST_S = 0.2


class LocalProfiler(core.DummyProfilerContext):
    """Writes to ``system_metrics.jsonl`` what Determined's profiler reports: one object a line, a line a group.

    Args:
        run_dir: The run directory.
        distributed: The ranks; the first one of a machine measures it.
    """

    def __init__(self, run_dir: Path, distributed: core.DistributedContext) -> None:
        self._path = RunDir(run_dir).system_metrics
        self._measures = distributed.local_rank == 0
        self._sampler: _Sampler | None = None

    def on(self, sampling_interval: int = 1, samples_per_report: int = 10) -> None:
        """Start sampling, as Determined's ``ProfilerContext.on`` (0.38.1).

        Args:
            sampling_interval: Seconds from sample to sample, > 0.
            samples_per_report: Samples that are averaged for a line, >= 1.
        """
        if self._measures and self._sampler is None:
            self._sampler = _Sampler(self._path, float(sampling_interval), samples_per_report)
            self._sampler.start()

    def off(self) -> None:
        """Stop, and write what has been sampled since the last line."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _close(self) -> None:
        self.off()


class _Sampler(threading.Thread):
    def __init__(self, path: Path, interval_s: float, samples_per_report: int) -> None:
        super().__init__(daemon=True, name="system metrics")
        self._path = path
        self._interval_s = interval_s
        self._samples_per_report = samples_per_report
        self._ends = threading.Event()
        self._collectors = [made for make in COLLECTORS if (made := _tried(make)) is not None]
        self._last_s = time.monotonic()
        self._has_sampled = False

    def run(self) -> None:
        num_samples = 0
        while not self._ends.wait(self._interval_s):
            self._sample()
            num_samples += 1
            if num_samples % self._samples_per_report == 0:
                self._report()

    def stop(self) -> None:
        """Stop, and write the rest; called by the thread that has started it."""
        self._ends.set()
        self.join()
        too_early_s = self._last_s + LEAST_S - time.monotonic()
        if too_early_s <= 0 or not self._has_sampled:  # the shortest run has one sample
            time.sleep(max(0.0, too_early_s))
            self._sample()
        self._report()

    def _sample(self) -> None:
        self._last_s = time.monotonic()
        self._has_sampled = True
        self._collectors = [
            collector for collector in self._collectors if _tried(collector.sample_metrics, True) is not None
        ]

    def _report(self) -> None:
        now = round(time.time(), 3)
        for collector in self._collectors:
            if collector.metric_samples:
                metrics = {socket.gethostname(): collector.aggregate()}
                collector.reset()
                append_record(self._path, {"group": collector.group, "time": now, "metrics": metrics})


def _tried(step: Callable[[], Any], done: Any = None) -> Any:
    """What a step returns, or ``done``; None where the machine has no such number, e.g. of disks in a container."""
    try:
        result = step()
    except Exception as error:
        logger.debug("no system metrics of %s: %s", step, error)
        return None
    return done if result is None else result
