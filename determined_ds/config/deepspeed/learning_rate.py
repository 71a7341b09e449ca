"""The learning rate that is trained with, where the optimizer and its schedule may each state one.

Some schedules never read the optimizer's rate: they set it, from parameters of their own. A rate that is stated in
one of the two places fills the other, so that the stated one is trained with; where both state one, the schedule's is
used, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Origin, Problem

LR: KeyPath = ("optimizer", "params", "lr")
# A schedule that sets the rate -> its parameter that holds the highest rate.
# Source: deepspeed 0.19.8 runtime/lr_schedules.py; OneCycleLR and CyclicLR in torch.optim.lr_scheduler.
PEAKS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}
# This one tries a range of rates, from its own start on; no rate that is stated elsewhere means anything to it.
RANGE_TEST, RANGE_START, RANGE_DEFAULT = "LRRangeTest", "lr_range_test_min_lr", 0.001
STATED_TWICE = "stated-twice"


class StatedRate(NamedTuple):
    """A rate that a DeepSpeed JSON states.

    Args:
        path: Where.
        value: A number; of a schedule also a list, one number for each parameter group.
    """

    path: KeyPath
    value: Any


def peak_path(ds: Document) -> KeyPath | None:
    """Where the schedule holds its highest rate; None where there is no schedule that sets the rate."""
    peak = PEAKS.get(str(ds.get(("scheduler", "type"))))
    return ("scheduler", "params", peak) if peak else None


def stated_rate(ds: Document) -> StatedRate | None:
    """The rate that a DeepSpeed JSON states and that is trained with; None where it leaves the rate open."""
    for path in (peak_path(ds), LR):
        value = ds.get(path) if path else None
        if path and (_is_number(value) or isinstance(value, list)):
            return StatedRate(path, value)
    return None


def states_rate(ds: Document) -> bool:
    """Whether a DeepSpeed JSON leaves no rate to a hyperparameter."""
    return stated_rate(ds) is not None or ds.get(("scheduler", "type")) == RANGE_TEST


def rate_for(path: KeyPath, ds: Document, stated: StatedRate | None) -> tuple[Any, Origin] | None:
    """What fills the optimizer's rate, or the highest of its schedule, where the other one is stated.

    Args:
        path: Of the rate to fill.
        ds: The DeepSpeed JSON.
        stated: See :func:`stated_rate`, of the JSON as it was written.

    Returns:
        The value and its origin; None for any other path, and where nothing is stated.
    """
    if stated is None or path not in (LR, peak_path(ds)) or not _is_number(stated.value):
        return None
    origin = ds.origin(stated.path)
    return stated.value, origin.reworded(f"{ds.key(stated.path)}, {origin}")


def rates_not_used(ds: Document, name: str, value: Any, hyperparameters: Document) -> Iterator[Problem]:
    """A warning for each rate that is stated and not trained with.

    Args:
        ds: The DeepSpeed JSON as it was written.
        name: Of the hyperparameter that states a rate.
        value: Of it; None where there is none.
        hyperparameters: All of them.
    """
    if ds.get(("scheduler", "type")) == RANGE_TEST:
        yield from _before_a_range_test(ds, name, value, hyperparameters)
        return
    stated = stated_rate(ds)
    if stated is None:
        return
    highest = f"{ds.key(stated.path)} = {stated.value} ({ds.origin(stated.path)})"
    if value not in (None, stated.value):
        message = f"is not used: the DeepSpeed JSON states {highest}"
        fix = f'write "auto" there to use the hyperparameter, or remove {name}'
        yield hyperparameters.problem((name,), message, fix, STATED_TWICE)
    own = ds.get(LR)
    if stated.path != LR and _is_number(own) and own not in _listed(stated.value):
        message = f"is not used: {ds.get(('scheduler', 'type'))} sets the rate, up to {highest}"
        fix = f'write "auto" for {ds.key(stated.path)} to use it, or "auto" here'
        yield ds.problem(LR, message, fix, STATED_TWICE)


def _before_a_range_test(ds: Document, name: str, value: Any, hyperparameters: Document) -> Iterator[Problem]:
    start: KeyPath = ("scheduler", "params", RANGE_START)
    first = ds.get(start, RANGE_DEFAULT)
    message = f"is not used: {RANGE_TEST} sets the rate, from {ds.key(start)} = {first} on"
    for document, path, rate in ((hyperparameters, (name,), value), (ds, LR, ds.get(LR))):
        if _is_number(rate) and rate != first:
            fix = f"remove it, or set {ds.key(start)} to {rate}"
            yield document.problem(path, message, fix, STATED_TWICE)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
