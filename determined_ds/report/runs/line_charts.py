"""Which pictures a page has, and which curves are in each: a metric's training and its validation are in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from determined_ds.report.runs.curves import VALIDATION, Curve

# What authors put before a metric's name to tell training from validation.
PREFIXES = ("training_", "train_", "validation_", "valid_", "val_", "eval_", "test_")
# Metrics that are one picture, under a title.
TITLES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "skipped_steps": "steps skipped for want of precision",
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
    "peak_memory": "peak memory of a rank, GiB",
    "memory": "memory of a rank, GB",
    "bubble": "share of time that a pipeline's stages wait",
}
TOGETHER = {
    "learning_rate": "lr",
    "peak_memory_gib": "peak_memory",
    "peak_memory_gib_min": "peak_memory",
    "memory_allocated_gb": "memory",
    "memory_reserved_gb": "memory",
    "bubble_ideal": "bubble",
}
FIRST = tuple(TITLES)


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A picture of the page.

    Args:
        name: Of what it shows.
        title: For people.
        curves: Names of the curves in it, e.g. ``training/loss``; runs lack some of them.
    """

    name: str
    title: str
    curves: tuple[str, ...]


def charts_of(runs: Iterable[Iterable[Curve]]) -> list[LineChart]:
    """The pictures: loss first, then all else that is validated, then how training went, then what remains.

    Args:
        runs: The curves of each run.
    """
    found: dict[str, dict[str, Curve]] = {}
    for curves in runs:
        for curve in curves:
            found.setdefault(_subject(curve.metric), {}).setdefault(curve.name, curve)
    order = sorted(found, key=lambda name: _place(name, list(found[name].values())))
    return [LineChart(name=name, title=TITLES.get(name, name), curves=tuple(found[name])) for name in order]


def _subject(metric: str) -> str:
    """``val_loss``, ``train_loss`` and ``loss`` are ``loss``."""
    for prefix in PREFIXES:
        if metric.startswith(prefix) and metric != prefix:
            metric = metric.removeprefix(prefix)
            break
    return TOGETHER.get(metric, metric)


def _place(name: str, curves: Sequence[Curve]) -> tuple[int, int, str]:
    if name == "loss":
        return (0, 0, "")
    if name in FIRST:
        return (2, FIRST.index(name), "")
    is_validated = any(curve.group == VALIDATION for curve in curves)
    return (1 if is_validated else 3, 0, name)
