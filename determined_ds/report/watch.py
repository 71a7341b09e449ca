"""A run that another process trains, or has trained, on a terminal: its files are followed as they grow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.report.closing import closing_block
from determined_ds.report.numbers import duration
from determined_ds.report.runs import trained_on
from determined_ds.report.state import STARTING, TRAINING, VALIDATION, RunState, report_line
from determined_ds.rundir.metrics_file import MetricsReader, Record
from determined_ds.rundir.records import read_run
from determined_ds.rundir.run_dir import RunDir, is_held, short

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

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    run = read_run(path)
    launch = run.launches[-1] if run.launches else None
    show("  ".join([run.name, *([trained_on(launch)] if launch else []), short(run.path)]))
    looks = _looks(path, since=launch.time if launch else 0.0)
    if console.is_terminal and not console.is_dumb_terminal:
        from determined_ds.report.panel import DrawnPanel

        panel = DrawnPanel(console)
        panel.start()
        try:
            for panel.state, _ in looks:
                panel.refresh()
        finally:
            panel.stop()
        panel.state = replace(panel.state, status="ended", detail="")
        console.print(panel.drawn())
    else:
        for state, records in looks:
            for record in records:
                if record["group"] in (TRAINING, VALIDATION):
                    at, digits = record["steps_completed"], len(str(state.total or 1))
                    show(report_line(record["group"], at, state.total, record["metrics"], digits=digits))
    for line in closing_block(read_run(path)):
        show(line)


def _looks(path: Path, since: float) -> Iterator[tuple[RunState, list[Record]]]:
    """What is known of a run and what is new, again and again, until all is read that an ended run has left.

    Speeds are not those of a launch earlier than ``since``.
    """
    there = RunDir(path)
    reader, is_running = MetricsReader(there.metrics), True
    state = RunState.of_config(read_run(path).config, STARTING)
    while is_running:
        is_running = is_held(there.path)  # first: what it has written before its end is read below
        new = reader.new_records()
        if reader.began_anew:  # it went back to a checkpoint
            state, since = RunState.of_config(read_run(path).config, STARTING), time.time()
        for record in new:
            state.take(record["group"], record["steps_completed"], record["metrics"])
            at = record.get("time")
            if not isinstance(at, (int, float)):
                state.status = TRAINING
            elif at >= since:
                state.status = TRAINING
                state.at(record["steps_completed"], at)
        state.detail = ""
        if state.status == STARTING and is_running and since:
            ago = duration(max(0, round(time.time() - since)))
            state.detail = f"since {ago}: it loads its code, model and data; nothing is reported yet"
        with contextlib.suppress(OSError):  # of a checkpoint that is deleted meanwhile
            if found := checkpoints_in(there.checkpoints):
                state.checkpoint = found[0].steps_completed
                state.checkpoint_time = found[0].path.stat().st_mtime
        yield state, new
        time.sleep(LOOK_EVERY_S if is_running else 0)
