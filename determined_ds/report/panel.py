"""The panel: a run in at most seven lines of 80 columns, drawn in place on a terminal by rich.

A line is a label and parts; parts that do not fit are left out from the right, so that it can be read at any width.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from determined_ds.memory.units import GIB
from determined_ds.report.numbers import duration, percent, rate, short_number, short_span
from determined_ds.report.state import RATE, TRAINING, RunState, metric_of

GB = 1e9
MOST_COLUMNS, LABEL, BETWEEN = 80, 12, "  "
BAR, CURVE = 30, 40  # columns at most, of the bar and of the curve
NARROW = 56  # below it names are left out that a label nearly says
NAMED = {TRAINING: "training", "validating": "validating", "checkpointing": "checkpoint"}
NOT_FINITE = "!"
# What curves and bars are drawn with: levels from low to high, full and empty.
UNICODE, ASCII = ("▁▂▃▄▅▆▇█", "━", "─"), ("_.-~=+*#", "#", "-")
Part = tuple[str, str]  # words and their style


class OpenConsole(Console):
    """A terminal whose cursor stays visible, also where the process is killed while the panel is on it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class DrawnPanel:
    """The panel while it is on the terminal; nothing of it is left at its end.

    Args:
        console: The terminal; that of this process if None.
    """

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

    @property
    def is_shown(self) -> bool:
        """Whether it is on the terminal."""
        return self._live.is_started

    def start(self) -> None:
        """Show it; from now on what is printed to ``sys.stdout`` and ``sys.stderr`` stands above it."""
        self._live.start()
        self.refresh()

    def refresh(self) -> None:
        """Draw it anew."""
        self._live.refresh()

    def stop(self) -> None:
        """Remove it."""
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a line above it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def clear_below(self, lines: int) -> None:
        """Remove what another process has written below it, so many lines."""
        self.console.file.write(f"\r\x1b[{lines}A\x1b[J")

    def drawn(self) -> Group:
        """Its lines, and an empty one: whatever else is written to the terminal begins on a line of its own."""
        is_unicode = self.console.encoding.lower().replace("-", "").startswith("utf")
        lines = panel_lines(self.state, self.console.width, UNICODE if is_unicode else ASCII)
        return Group(*lines, Text())


def panel_lines(state: RunState, columns: int, signs: tuple[str, str, str] = UNICODE) -> list[Text]:
    """The lines, each shorter than ``columns`` by one at least."""
    room = max(1, min(columns, MOST_COLUMNS) - 1)
    lines = {
        "loss": _loss(state, room, signs[0]),
        "lr": _steps(state),
        "speed": _speed(state),
        "memory": _memory(state),
        "validation": _validation(state, room),
        "checkpoint": _checkpoint(state),
    }
    status = NAMED.get(state.status, state.status)
    found = [_fitted((status, "bold"), _progress(state, room, signs), room)]
    found += [_fitted((label, "dim"), parts, room) for label, parts in lines.items() if parts]
    return found


def _fitted(label: Part, parts: Sequence[Part], room: int) -> Text:
    """The label, and the parts after it while they fit; the first one is cut to what is left."""
    words, style = label
    line = Text(no_wrap=True, overflow="crop")
    line.append((f"{words:<{LABEL}}" if room > 3 * LABEL else f"{words[: LABEL - 1]} ")[:room], style)
    for index, (text, style) in enumerate(parts):
        if not index:
            line.append(text[: max(0, room - len(line))], style or None)
        elif len(text) + len(BETWEEN) > room - len(line):
            break
        else:
            line.append(BETWEEN).append(text, style or None)
    return line


def _progress(state: RunState, room: int, signs: tuple[str, str, str]) -> list[Part]:
    """Batches, how much that is, time left."""
    if state.detail:
        return [(state.detail, "")]
    if not state.total:
        return [(f"batch {state.batch:,}", "")]
    share = min(1.0, state.batch / state.total)
    words = [(f"batch {state.batch:,}/{state.total:,}", ""), (f"{math.floor(100 * share)} %", "")]
    left = state.seconds_left()
    if left is not None and share < 1:
        words.append((f"{duration(round(left))} left", ""))
    bar = min(BAR, room - LABEL - sum(len(text) + len(BETWEEN) for text, _ in words))
    if bar >= 8:
        full = math.floor(bar * share)
        words.insert(2, (signs[1] * full + signs[2] * (bar - full), "cyan"))
    return words


def _loss(state: RunState, room: int, levels: str) -> list[Part]:
    loss = state.loss
    if loss is None:
        return []
    words = f"{short_number(loss):<8}"
    curve = sparkline(state.losses, max(0, min(CURVE, room - LABEL - len(words) - len(BETWEEN))), levels)
    parts = [(words, "" if math.isfinite(loss) else "bold red"), (curve, "cyan")]
    if state.first_loss is not None and len(state.losses) > 1:
        parts.append((f"from {short_number(state.first_loss)}", "dim"))
    return parts


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """A curve in one line of text: each sign is the mean of its share of the values, ``!`` where it is not finite."""
    if len(values) > width:
        edges = [len(values) * index // width for index in range(width + 1)] if width > 0 else []
        values = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(
        levels[round((value - low) * scale)] if math.isfinite(value) else NOT_FINITE for value in values
    )


def _steps(state: RunState) -> list[Part]:
    """What DeepSpeed says of its last step."""
    rate_now = metric_of(state.training, *RATE)
    found = [] if rate_now is None else [(f"{rate_now:.3g}", "")]
    shown = {"grad_norm": "gradient norm", "loss_scale": "loss scale", "skipped_steps": "skipped"}
    for name, words in shown.items():
        value = metric_of(state.training, name)
        if value is not None and (value or name != "skipped_steps"):
            found.append((f"{words} {short_number(value)}", ""))
    return found


def _speed(state: RunState) -> list[Part]:
    found = [
        (rate(value, unit), "")
        for unit in ("samples", "tokens")
        if (value := metric_of(state.training, f"{unit}_per_second")) is not None
    ]
    if state.step_seconds is not None:
        found.append((f"{1000 * state.step_seconds:,.1f} ms a step", ""))
    bubble = metric_of(state.training, "bubble")
    return [*found, *([(f"bubble {percent(bubble, 0)}", "")] if bubble is not None else [])]


def _memory(state: RunState) -> list[Part]:
    most = metric_of(state.training, "peak_memory_gib")
    if most is None:
        return []
    least = metric_of(state.training, "peak_memory_gib_min")
    found = [(f"peak {short_span(most if least is None else least, most)} GiB/rank", "")]
    held, reserved = (metric_of(state.training, f"memory_{name}_gb") for name in ("allocated", "reserved"))
    if held is not None and reserved is not None:
        more = "" if reserved == held else f", {GB / GIB * reserved:.3g} reserved"
        found.append((f"{GB / GIB * held:.3g} now{more}", "dim"))
    return found


def _validation(state: RunState, room: int) -> list[Part]:
    last, best = state.validation, state.best
    if last is None:
        return []
    where = ("before training" if last.batch == 0 else f"at batch {last.batch:,}", "")
    words = short_number(last.value) if room < NARROW else f"{last.name} {short_number(last.value)}"
    shown = (words, "" if math.isfinite(last.value) else "bold red")
    if best is last:
        return [shown, ("the best", "green"), where]
    return [
        shown,
        where,
        *([(f"best {short_number(best.value)} at {best.batch:,}", "green")] if best else []),
    ]


def _checkpoint(state: RunState) -> list[Part]:
    found = []
    if state.checkpoint is not None:
        found.append((f"batch {state.checkpoint:,}", ""))
    if state.writing is not None:
        found.append((f"writing batch {state.writing:,}", "yellow"))
    if state.checkpoint is not None and state.checkpoint_time is not None:
        found.append((f"{duration(max(0, round(time.time() - state.checkpoint_time)))} ago", "dim"))
    return found
