"""A report of metrics as a line for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Of a metric that is not a number, on a line for people.
MAX_LISTED, MAX_TEXT = 6, 40
ORDER = ("loss", "validation_loss", "lr", "samples_per_second", "tokens_per_second")
HIDDEN = (
    *("batches", "epochs", "samples", "grad_norm", "loss_scale"),
    *("peak_memory_gib", "peak_memory_gib_min", "memory_allocated_gb", "memory_reserved_gb", "bubble_ideal"),
)


def show(name: str, value: Any) -> str:
    """A metric for people: four significant digits, thousands grouped, rates with their unit."""
    if name.endswith("_per_second"):
        return f"{value:,.{0 if value >= 100 else 1}f} {name.removesuffix('_per_second')}/s"
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
        return f"{name} {text}"
    if isinstance(value, (list, tuple)):
        return f"{name} {_show_list(value)}"
    if isinstance(value, Mapping):
        return f"{name} {{{len(value)} entries}}"
    text = str(value)
    return f"{name} {text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + '...'}"


def _show_list(values: Sequence[Any]) -> str:
    """In full where it is short and flat; else its size."""
    if len(values) > MAX_LISTED or not all(isinstance(value, (int, float)) for value in values):
        return f"[{len(values)} values]"
    return "[" + " ".join(f"{value:.4g}" for value in values) + "]"


def summary(metrics: Mapping[str, Any]) -> str:
    """The metrics that people read, in a line."""
    names = [name for name in ORDER if name in metrics]
    names += [name for name in metrics if name not in ORDER and name not in HIDDEN]
    return "  ".join(show(name, metrics[name]) for name in names)


def report_line(
    group: str, batch: int, total: int | None, metrics: Mapping[str, Any], *, digits: int = 1
) -> str:
    """``training    batch  10/200  loss 3.1  lr 0.0006  164 samples/s``.

    Args:
        group: ``training`` or ``validation``.
        batch: Batches trained.
        total: In all; None where that is not known.
        metrics: As they were reported.
        digits: Of the batch at least, so that lines stand below each other.
    """
    of = f"/{total}" if total else ""
    return f"{group:<10}  batch {batch:>{digits}}{of}  {summary(metrics)}"
