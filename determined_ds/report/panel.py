"""The panel: a run in at most seven lines, drawn in place on a terminal by rich. A line is cut where it has no room."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from determined_ds.report.numbers import duration, percent, rate, short_number, short_span
from determined_ds.report.state import LOSS, RATE, RunState, metric_of

LABEL, BAR, CURVE = 12, 30, 40  # columns
NAMED = {"checkpointing": "checkpoint"}
# What curves and bars are drawn with: levels from low to high, full and empty; ASCII where a terminal has no more.
UNICODE, ASCII = ("▁▂▃▄▅▆▇█", "━", "─"), ("_.-~=+*#", "#", "-")
Part = tuple[str, str]  # words and their style


class OpenConsole(Console):
    """A terminal whose cursor stays visible, also where the process is killed while the panel is on it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class DrawnPanel:
    """The panel while it is on the terminal, by default that of this process; nothing of it is left at its end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or OpenConsole(highlight=False)
        self.state = RunState()
        self._live = Live(
            get_renderable=self.drawn,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # one that goes to a file goes there still
            vertical_overflow="crop",
        )
        self.refresh, self.stop = self._live.refresh, self._live.stop

    @property
    def is_shown(self) -> bool:
        """Whether it is on the terminal."""
        return self._live.is_started

    def start(self) -> None:
        """Show it; from now on what is printed to ``sys.stdout`` and ``sys.stderr`` stands above it."""
        self._live.start()
        self.refresh()

    def note(self, text: str) -> None:
        """Print a line above it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def clear_below(self, lines: int) -> None:
        """Remove what another process has written below it, so many lines."""
        self.console.file.write(f"\r\x1b[{lines}A\x1b[J")

    def drawn(self) -> Group:
        """Its lines, each shorter than the terminal is wide, and an empty one for what else is written there."""
        is_unicode = self.console.encoding.lower().replace("-", "").startswith("utf")
        columns = self.console.width
        lines: list[Text] = []
        for label, parts in _parts(self.state, columns, UNICODE if is_unicode else ASCII):
            if parts:
                line = Text(no_wrap=True, overflow="crop")
                line.append(f"{label:<{LABEL}}", "dim" if lines else "bold")
                for words, style in parts:
                    line.append(f"{words}  ", style)
                line.truncate(columns - 1)
                lines.append(line)
        return Group(*lines, Text())


def _parts(state: RunState, columns: int, signs: tuple[str, str, str]) -> list[tuple[str, list[Part]]]:
    """A label, and what stands in its line; nothing where nothing is known."""
    levels, full, empty = signs
    now: list[Part] = [(state.detail or f"batch {state.batch:,}", "")]
    if state.total and not state.detail:
        share, left = min(1.0, state.batch / state.total), state.seconds_left()
        bar = min(BAR, columns - 50)
        done = math.floor(bar * share)
        now = [(f"batch {state.batch:,}/{state.total:,}", ""), (f"{math.floor(100 * share)} %", "")]
        now.append((full * done + empty * (bar - done), "cyan"))
        now += [(f"{duration(round(left))} left", "")] if left is not None and share < 1 else []

    known = {name: value for name in state.training if (value := metric_of(state.training, name)) is not None}
    losses: list[Part] = []
    if (loss := metric_of(known, *LOSS)) is not None:
        curve = _sparkline(state.losses, min(CURVE, columns - 2 * LABEL), levels)
        losses = [(f"{short_number(loss):<8}", "" if math.isfinite(loss) else "bold red"), (curve, "cyan")]
        losses += [(f"from {short_number(state.losses[0])}", "dim")] if len(state.losses) > 1 else []
    lr = metric_of(known, *RATE)
    steps: list[Part] = [(f"{lr:.3g}", "")] if lr is not None else []
    for name in ("grad_norm", "loss_scale", "skipped_steps"):
        if name in known and (known[name] or name != "skipped_steps"):
            words = {"grad_norm": "gradient norm"}.get(name, name.replace("_", " "))
            steps.append((f"{words} {short_number(known[name])}", ""))
    units = [unit for unit in ("samples", "tokens") if f"{unit}_per_second" in known]
    speed: list[Part] = [(rate(known[f"{unit}_per_second"], unit), "") for unit in units]
    speed += [(f"bubble {percent(known['bubble'], 0)}", "")] if "bubble" in known else []
    memory: list[Part] = []
    if (most := known.get("peak_memory_gib")) is not None:
        memory = [(f"peak {short_span(known.get('peak_memory_gib_min', most), most)} GiB/rank", "")]
    validation: list[Part] = []
    if (last := state.validation) is not None:
        where = "before training" if last.steps == 0 else f"at batch {last.steps:,}"
        style = "" if math.isfinite(last.value) else "bold red"
        validation = [(f"{last.metric} {short_number(last.value)}", style), (where, "")]
        if best := state.best:
            words = "the best" if best is last else f"best {short_number(best.value)} at {best.steps:,}"
            validation.append((words, "green"))
    checkpoint = [(f"batch {state.checkpoint:,}", "")] if state.checkpoint is not None else []
    checkpoint += [(f"writing batch {state.writing:,}", "yellow")] if state.writing is not None else []
    if state.checkpoint is not None and state.checkpoint_time is not None:
        checkpoint.append((f"{duration(max(0, round(time.time() - state.checkpoint_time)))} ago", "dim"))
    return [
        (NAMED.get(state.status, state.status), now),
        *(("loss", losses), ("lr", steps), ("speed", speed), ("memory", memory)),
        *(("validation", validation), ("checkpoint", checkpoint)),
    ]


def _sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """A curve in one line of text: each sign is the mean of its share of the values, ``!`` where it is not finite."""
    if len(values) > width:
        edges = [len(values) * index // width for index in range(width + 1)] if width > 0 else []
        values = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values)
