"""A run that another process trains, or has trained, on a terminal: its files are followed as they grow."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.report.closing import closing_block
from determined_ds.report.numbers import count, duration
from determined_ds.report.state import STARTING, TRAINING, VALIDATION, RunState, report_line
from determined_ds.rundir.metrics_file import MetricsReader, Record
from determined_ds.rundir.records import RecordedRun, read_run
from determined_ds.rundir.run_dir import RunDir, short
from determined_ds.rundir.run_lock import is_held

if TYPE_CHECKING:
    from rich.console import Console

LOOK_EVERY_S = 0.5


def follow(path: Path, console: Console) -> None:
    """Show a run until it ends: the panel on a terminal, a line a report elsewhere; then what came of it.

    Args:
        path: The run directory.
        console: Where to.

    Raises:
        ConfigError: it is not a run directory.
    """
    run = read_run(path)
    followed = _Followed(run)

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    launch = run.launches[-1] if run.launches else None
    where = [launch.strategy, f"{count(launch.slots, 'slot')} on {launch.accelerator}"] if launch else []
    show("  ".join(filter(None, (run.name, ", ".join(filter(None, where)), short(run.path)))))
    if console.is_terminal and not console.is_dumb_terminal:
        from determined_ds.report.panel import DrawnPanel

        panel = DrawnPanel(console)
        panel.state = followed.state
        panel.start()
        try:
            while followed.look() is not None:
                panel.state = followed.state
                panel.refresh()
                time.sleep(LOOK_EVERY_S if followed.is_running else 0)
        finally:
            panel.stop()
        panel.state = replace(followed.state, status="ended", detail="")
        console.print(panel.drawn())
    else:
        while (new := followed.look()) is not None:
            for record in new:
                total, group = followed.state.total, record["group"]
                if group in (TRAINING, VALIDATION):
                    at, digits = record["steps_completed"], len(str(total or 1))
                    show(report_line(group, at, total, record["metrics"], digits=digits))
            time.sleep(LOOK_EVERY_S if followed.is_running else 0)
    for line in closing_block(read_run(path)):
        show(line)


class _Followed:
    """A run directory, read as it grows."""

    def __init__(self, run: RecordedRun) -> None:
        self._there = RunDir(run.path)
        self._reader = MetricsReader(self._there.metrics)
        self._since = run.launches[-1].time if run.launches else 0.0
        self._looked = 0.0
        self.state = RunState.of_config(run.config, STARTING)
        self.is_running = True

    def look(self) -> list[Record] | None:
        """Read what is new; None once all is read that an ended run has left."""
        if not self.is_running:
            return None
        self.is_running = is_held(self._there.path)  # first: what it has written before its end is read below
        new = self._reader.new_records()
        if self._reader.began_anew:  # it went back to a checkpoint
            self.state = RunState.of_config(read_run(self._there.path).config, STARTING)
            self._looked, self._since = 0.0, time.time()
        state = self.state
        for record in new:
            state.take(record["group"], record["steps_completed"], record["metrics"])
            at = record.get("time")
            if not isinstance(at, (int, float)):
                state.status = TRAINING
            elif at >= self._since:  # not of an earlier launch
                state.status = TRAINING
                state.at(record["steps_completed"], at)
        state.detail = ""
        if state.status == STARTING and self.is_running and self._since:
            ago = duration(max(0, round(time.time() - self._since)))
            state.detail = f"since {ago}: it loads its code, model and data; nothing is reported yet"
        self._look_at_checkpoints()
        return new

    def _look_at_checkpoints(self) -> None:
        with contextlib.suppress(OSError):
            changed = self._there.checkpoints.stat().st_mtime
            if changed != self._looked:
                self._looked = changed
                if found := checkpoints_in(self._there.checkpoints):
                    self.state.checkpoint = found[0].steps_completed
                    self.state.checkpoint_time = found[0].path.stat().st_mtime
