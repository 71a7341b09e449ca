"""The panel: a run in at most seven lines of 80 columns, as plain parts with styles.

A line is a label and parts; parts that do not fit are left out from the right, so that it can be read at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_ds.memory.units import GIB
from determined_ds.report.terminal.run_state import TRAINING, RunState, SeenValidation
from determined_ds.report.terminal.short_numbers import in_time, number, rate, span
from determined_ds.report.terminal.sparkline import BLOCKS, PLAIN, sparkline

if TYPE_CHECKING:
    from rich.console import Group

GB = 1e9
MOST_COLUMNS, LABEL, BETWEEN = 80, 12, "  "
BAR = 30  # columns at most, as of the curve
CURVE = 40
NARROW = 56  # below it names are left out that a label nearly says
GOOD, QUIET, BAD, PLAIN_STYLE = "green", "dim", "bold red", ""
NAMED = {TRAINING: "training", "validating": "validating", "checkpointing": "checkpoint"}


@dataclass(frozen=True)
class Part:
    """Some words of a line.

    Args:
        text: They.
        style: As rich knows it; "" for none.
    """

    text: str
    style: str = PLAIN_STYLE


@dataclass(frozen=True)
class Signs:
    """What lines and curves are drawn with.

    Args:
        levels: From low to high.
        full: Of a bar.
        empty: The same.
    """

    levels: str = BLOCKS
    full: str = "━"
    empty: str = "─"


UNICODE, ASCII = Signs(), Signs(levels=PLAIN, full="#", empty="-")


def signs_for(encoding: str) -> Signs:
    """The signs that a terminal of this encoding shows."""
    return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


def panel_lines(state: RunState, *, columns: int, now: float, signs: Signs = UNICODE) -> list[list[Part]]:
    """The lines, each shorter than ``columns`` by one at least.

    Args:
        state: Of the run.
        columns: Of the terminal.
        now: Seconds since the epoch.
        signs: To draw with.
    """
    room = max(1, min(columns, MOST_COLUMNS) - 1)
    lines = [
        _progress(state, room, signs),
        _loss(state, room, signs),
        _steps(state),
        _speed(state),
        _memory(state),
        _validation(state, room),
        _checkpoint(state, now),
    ]
    return [_fitted(line, room) for line in lines if len(line) > 1]


def panel_text(state: RunState, *, columns: int, now: float, signs: Signs = UNICODE) -> Group:
    """The lines for rich, and an empty one: whatever else is written to the terminal begins on a line of its own."""
    from rich.console import Group
    from rich.text import Text

    lines = []
    for parts in panel_lines(state, columns=columns, now=now, signs=signs):
        line = Text(no_wrap=True, overflow="crop")
        for part in parts:
            line.append(part.text, part.style or None)
        lines.append(line)
    return Group(*lines, Text())


def _fitted(parts: Sequence[Part], room: int) -> list[Part]:
    """The label, and the parts after it while they fit; the first one is cut to what is left."""
    label, first, *rest = parts
    narrow = label.text if room > 3 * LABEL else f"{label.text.rstrip()[: LABEL - 1]} "
    narrow = narrow[:room]
    found = [Part(narrow, label.style), Part(first.text[: max(0, room - len(narrow))], first.style)]
    left = room - sum(len(part.text) for part in found)
    for part in rest:
        if len(part.text) + len(BETWEEN) > left:
            break
        found += [Part(BETWEEN), part]
        left -= len(part.text) + len(BETWEEN)
    return found


def _label(text: str) -> Part:
    return Part(f"{text:<{LABEL}}", QUIET)


def _progress(state: RunState, room: int, signs: Signs) -> list[Part]:
    """Status, batches, how much that is, time left."""
    status = NAMED.get(state.status, state.status)
    label = Part(f"{status:<{LABEL}}", "bold")
    if not state.total:
        return [label, Part(f"batch {state.batch:,}")]
    share = min(1.0, state.batch / state.total)
    words = [Part(f"batch {state.batch:,}/{state.total:,}"), Part(f"{math.floor(100 * share)} %")]
    left = state.seconds_left()
    if left is not None and share < 1:
        words.append(Part(f"{in_time(left)} left"))
    taken = len(label.text) + sum(len(part.text) + len(BETWEEN) for part in words)
    bar = min(BAR, room - taken)
    if bar >= 8:
        full = math.floor(bar * share)
        words.insert(2, Part(signs.full * full + signs.empty * (bar - full), "cyan"))
    return [label, *words]


def _loss(state: RunState, room: int, signs: Signs) -> list[Part]:
    loss = state.loss
    if loss is None:
        return [_label("loss")]
    style = PLAIN_STYLE if math.isfinite(loss) else BAD
    words = Part(f"{number(loss):<8}", style)
    curve = min(CURVE, room - LABEL - len(words.text) - len(BETWEEN))
    drawn = sparkline(state.losses.values, max(0, curve), signs.levels)
    first = state.first_loss
    began = (
        [Part(f"from {number(first)}", QUIET)] if first is not None and len(state.losses.values) > 1 else []
    )
    return [_label("loss"), words, Part(drawn, "cyan"), *began]


def _steps(state: RunState) -> list[Part]:
    """What DeepSpeed says of its last step."""
    found = [] if state.learning_rate is None else [Part(f"{state.learning_rate:.3g}")]
    shown = {"grad_norm": "gradient norm", "loss_scale": "loss scale", "skipped_steps": "skipped"}
    for name, words in shown.items():
        value = state.training.get(name)
        if isinstance(value, (int, float)) and not (name == "skipped_steps" and not value):
            found.append(Part(f"{words} {number(value)}"))
    return [_label("lr"), *found]


def _speed(state: RunState) -> list[Part]:
    found = [
        Part(rate(state.training[f"{unit}_per_second"], unit))
        for unit in ("samples", "tokens")
        if isinstance(state.training.get(f"{unit}_per_second"), (int, float))
    ]
    if state.step_seconds is not None:
        found.append(Part(f"{1000 * state.step_seconds:,.1f} ms a step"))
    bubble = state.training.get("bubble")
    if isinstance(bubble, (int, float)):
        found.append(Part(f"bubble {bubble:.0%}"))
    return [_label("speed"), *found]


def _memory(state: RunState) -> list[Part]:
    most = state.training.get("peak_memory_gib")
    if not isinstance(most, (int, float)):
        return [_label("memory")]
    least = state.training.get("peak_memory_gib_min", most)
    found = [Part(f"peak {span(least, most, 'GiB')}/rank")]
    held, reserved = (state.training.get(f"memory_{name}_gb") for name in ("allocated", "reserved"))
    if isinstance(held, (int, float)) and isinstance(reserved, (int, float)):
        more = "" if reserved == held else f", {GB / GIB * reserved:.3g} reserved"
        found.append(Part(f"{GB / GIB * held:.3g} now{more}", QUIET))
    return [_label("memory"), *found]


def _validation(state: RunState, room: int) -> list[Part]:
    last, best = state.validation, state.best
    if last is None:
        return [_label("validation")]
    where = "before training" if last.batch == 0 else f"at batch {last.batch:,}"
    words = number(last.value) if room < NARROW else f"{last.name} {number(last.value)}"
    shown = Part(words, PLAIN_STYLE if math.isfinite(last.value) else BAD)
    if best is last:
        return [_label("validation"), shown, Part("the best", GOOD), Part(where)]
    return [_label("validation"), shown, Part(where), *_best(best)]


def _best(best: SeenValidation | None) -> Iterator[Part]:
    if best is not None:
        yield Part(f"best {number(best.value)} at {best.batch:,}", GOOD)


def _checkpoint(state: RunState, now: float) -> list[Part]:
    found = []
    if state.checkpoint is not None:
        found.append(Part(f"batch {state.checkpoint:,}"))
    if state.writing is not None:
        found.append(Part(f"writing batch {state.writing:,}", "yellow"))
    if state.checkpoint is not None and state.checkpoint_time is not None:
        found.append(Part(f"{in_time(now - state.checkpoint_time)} ago", QUIET))
    return [_label("checkpoint"), *found]


def plain(lines: Sequence[Sequence[Part]]) -> list[str]:
    """The lines without styles."""
    return ["".join(part.text for part in line).rstrip() for line in lines]


def fields_of(config: Any) -> dict[str, Any]:
    """What of a run's configuration the panel goes by: the searcher's metric, its direction, the length in batches."""
    searcher = dict(config.get("searcher") or {})
    hyperparameters = config.get("hyperparameters") or {}
    fit = hyperparameters.get("fit") if isinstance(hyperparameters, dict) else None
    length = (fit or {}).get("max_length") if isinstance(fit, dict) else None
    batches = length.get("batches") if isinstance(length, dict) else None
    return {
        "metric": str(searcher.get("metric") or ""),
        "smaller_is_better": searcher.get("smaller_is_better") is not False,
        "total": batches if isinstance(batches, int) else None,
    }
