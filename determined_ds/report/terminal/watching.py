"""A run that another process trains, or has trained, on a terminal: its files are followed as they grow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.report.terminal.closing import closing_block
from determined_ds.report.terminal.panel import fields_of, panel_text, signs_for
from determined_ds.report.terminal.report_line import report_line
from determined_ds.report.terminal.run_state import STARTING, TRAINING, RunState
from determined_ds.report.terminal.short_numbers import joined
from determined_ds.rundir.metrics_file import MetricsReader, Record
from determined_ds.rundir.records import RecordedRun, read_run
from determined_ds.rundir.run_dir import RunDir, short
from determined_ds.rundir.run_lock import is_held

if TYPE_CHECKING:
    from rich.console import Console

LOOK_EVERY_S = 0.5


class FollowedRun:
    """A run directory, read as it grows.

    Args:
        run: As it was when it was opened.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._there = RunDir(run.path)
        self._reader = MetricsReader(self._there.metrics)
        self._config = run.config
        self._since = run.launches[-1].time if run.launches else 0.0
        self._looked = 0.0
        self.state = RunState(**fields_of(run.config), status=STARTING)
        self.is_running = run.is_running

    def look(self) -> list[Record]:
        """Read what is new. Returns the records that were added."""
        self.is_running = is_held(self._there.path)  # first: what it has written before its end is read below
        new = self._reader.new_records()
        if self._reader.began_anew:  # it went back to a checkpoint
            self._config = read_run(self._there.path).config
            self.state = RunState(**fields_of(self._config), status=STARTING)
            self._looked, self._since = 0.0, time.time()
        for record in new:
            self.state.take(record["group"], record["steps_completed"], record["metrics"])
            at = record.get("time")
            if not isinstance(at, (int, float)):
                self.state.status = TRAINING
            elif at >= self._since:  # not of an earlier launch
                self.state.status = TRAINING
                self.state.at(record["steps_completed"], at)
        self._look_at_checkpoints()
        return new

    def _look_at_checkpoints(self) -> None:
        try:
            changed = self._there.checkpoints.stat().st_mtime
        except OSError:
            return
        if changed == self._looked:
            return
        self._looked = changed
        if found := checkpoints_in(self._there.checkpoints):
            self.state.checkpoint = found[0].steps_completed
            with contextlib.suppress(FileNotFoundError):  # the run has deleted it meanwhile
                self.state.checkpoint_time = found[0].path.stat().st_mtime


def follow(path: Path, console: Console) -> None:
    """Show a run until it ends: the panel on a terminal, a line a report elsewhere; then what came of it.

    Args:
        path: The run directory.
        console: Where to.

    Raises:
        ConfigError: it is not a run directory.
    """
    run = read_run(path)
    followed = FollowedRun(run)
    _print(console, _headline(run))
    if console.is_terminal and not console.is_dumb_terminal:
        _show_panel(followed, console)
    else:
        _print_lines(followed, console)
    for line in closing_block(read_run(path)):
        _print(console, line)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _headline(run: RecordedRun) -> str:
    launch = run.launches[-1] if run.launches else None
    what = joined([launch.strategy, f"slots {launch.slots} on {launch.accelerator}"]) if launch else ""
    return joined([run.name, what, short(run.path)], "  ")


def _looks(followed: FollowedRun) -> Iterator[list[Record]]:
    """What is new, from time to time, until the run has ended."""
    while True:
        yield followed.look()
        if not followed.is_running:
            return
        time.sleep(LOOK_EVERY_S)


def _show_panel(followed: FollowedRun, console: Console) -> None:
    from determined_ds.report.terminal.drawn_panel import DrawnPanel

    panel = DrawnPanel(console)
    panel.state = followed.state
    panel.start()
    try:
        for _ in _looks(followed):
            panel.state = followed.state
            panel.refresh()
    finally:
        panel.stop()
    ended = replace(followed.state, status="ended")
    console.print(
        panel_text(ended, columns=console.width, now=time.time(), signs=signs_for(console.encoding))
    )


def _print_lines(followed: FollowedRun, console: Console) -> None:
    for new in _looks(followed):
        for record in new:
            total, digits = followed.state.total, len(str(followed.state.total or 1))
            if record["group"] in ("training", "validation"):
                line = report_line(
                    record["group"], record["steps_completed"], total, record["metrics"], digits=digits
                )
                _print(console, line)
