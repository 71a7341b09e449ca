"""What the panel costs a training, and docs/run.svg drawn from a run on an idle machine::

python -m tests.benchmarks.terminal
make run | tee output.txt
python -m tests.benchmarks.terminal output.txt RUN_DIR docs/run.svg
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console

from determined_ds.protocol.metrics_file import Record
from determined_ds.protocol.recorded_run import RecordedRun, read_run
from determined_ds.report.terminal.closing import closing_block
from determined_ds.report.terminal.drawn_panel import OpenConsole
from determined_ds.report.terminal.panel import fields_of, panel_text
from determined_ds.report.terminal.report_line import report_line
from determined_ds.report.terminal.run_state import RunState
from determined_ds.runtime.loop.live_panel import DRAWN_EVERY_S, LivePanel

REPORT = {
    "lr": 0.001,
    "grad_norm": 0.8,
    "samples_per_second": 164.0,
    "tokens_per_second": 21_000.0,
    "peak_memory_gib": 0.7,
    "peak_memory_gib_min": 0.6,
    "memory_allocated_gb": 0.7,
}
SHARE_SHOWN = 0.6  # of the run in the picture


def cost() -> str:
    """A draw and a step without one, and what that is of a training's time."""
    with open(os.devnull, "w") as nowhere:
        console = OpenConsole(file=nowhere, force_terminal=True, color_system="truecolor", width=80)
        panel = LivePanel(console=console)
        panel.start(total=10_000, done=0, metric="validation_loss")
        for batch in range(600):
            panel.report("training", batch, {**REPORT, "loss": 5 * math.exp(-batch / 100)})
        panel.report("validation", 600, {"validation_loss": 2.0})
        draws = []
        for batch in range(200):
            panel._next_s, started = 0.0, time.perf_counter()
            panel.step(batch)
            draws.append(time.perf_counter() - started)
        panel._next_s, started, steps = math.inf, time.perf_counter(), 200_000
        for batch in range(steps):
            panel.step(batch)
        step_s = (time.perf_counter() - started) / steps
        panel.stop()
    draw_s = statistics.median(draws)
    return (
        f"a draw {1000 * draw_s:.2f} ms, a step without one {1e6 * step_s:.2f} µs: "
        f"{draw_s / DRAWN_EVERY_S:.2%} of the time, and {step_s / 0.005:.3%} of a step of 5 ms"
    )


def picture(output: list[str], run: RecordedRun, path: Path) -> None:
    """Draw a run in the midst of its training, and its end, as a terminal of 80 columns shows them.

    Args:
        output: What it has printed without a terminal; the lines before its first report are shown.
        run: The same.
        path: The picture.
    """
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True,
            width=80,
            file=nowhere,
            force_terminal=True,
            color_system="truecolor",
            highlight=False,
        )
        console.print("$ make run", style="bold")
        for line in itertools.takewhile(lambda line: not line.startswith("training"), output):
            console.print(line, markup=False)
        state, shown = RunState(**fields_of(run.config)), _until(run, SHARE_SHOWN)
        for record in shown:
            batch, metrics = record["steps_completed"], record["metrics"]
            state.take(record["group"], batch, metrics)
            state.at(batch, record["time"])
            if record["group"] == "validation":
                console.print(report_line("validation", batch, state.total, metrics, digits=3))
                state.checkpoint, state.checkpoint_time = batch, record["time"]
        console.print(panel_text(state, columns=80, now=shown[-1]["time"]))
        console.print("...\n", style="dim")
        for line in closing_block(run):
            console.print(line, markup=False)
    console.save_svg(str(path), title="")


def _until(run: RecordedRun, share: float) -> list[Record]:
    last = max(record["steps_completed"] for record in run.records)
    return [record for record in run.records if record["steps_completed"] <= share * last]


if __name__ == "__main__":
    if len(sys.argv) == 4:
        picture(Path(sys.argv[1]).read_text().splitlines(), read_run(Path(sys.argv[2])), Path(sys.argv[3]))
    else:
        print(cost())
