"""What differs between the runs of a page, in tables, and what is the same in all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from determined_ds.config.params import TRIAL_SEED
from determined_ds.report.runs.given_values import (
    DifferingKey,
    Settings,
    configuration,
    differences,
    environment,
    with_sections,
)
from determined_ds.report.runs.run_view import RunView
from determined_ds.rundir.handed_on import count

MISSING = "–"
LONG = 10  # characters of a number
MOST_COLUMNS = 8  # keys that are columns beside the final figures
CAUSES, CONSEQUENCES = ("hyperparameters", "decided"), ("DeepSpeed", "environment")


@dataclass(frozen=True, kw_only=True)
class DifferingCell:
    """A run's value of a key.

    Args:
        value: Whole, to sort by.
        text: To show: ``0.00210485`` for a number that was drawn.
    """

    value: str
    text: str


@dataclass(frozen=True, kw_only=True)
class DifferingColumn:
    """A key that differs.

    Args:
        key: Dotted.
        cells: Of each run.
    """

    key: str
    cells: tuple[DifferingCell, ...]


@dataclass(frozen=True, kw_only=True)
class DifferingTable:
    """Keys that differ, a row each.

    Args:
        title: Of the table.
        rows: Of it.
        is_open: Whether its rows are shown at first.
    """

    title: str
    rows: tuple[DifferingColumn, ...]
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class Apart:
    """What differs.

    Args:
        columns: Of the table of final figures: hyperparameters, and what was decided, where few of them differ.
        tables: The others, and what follows from them.
    """

    columns: tuple[DifferingColumn, ...] = ()
    tables: tuple[DifferingTable, ...] = ()


def differing(runs: Sequence[RunView]) -> Apart:
    """What differs between runs: first the hyperparameters and what was decided, then what follows from them."""
    sections = [sections_of(shown) for shown in runs]
    causes, consequences = (_differing_in(names, sections) for names in (CAUSES, CONSEQUENCES))
    seeds = tuple(column for column in causes if column.key == TRIAL_SEED)
    if len(causes) > 1:  # in a search they always differ, and matter least
        causes = tuple(column for column in causes if column not in seeds)
        consequences += seeds
    tables = []
    if len(causes) > MOST_COLUMNS:
        title = f"Hyperparameters and what was decided: {count(len(causes), 'key')}"
        tables.append(DifferingTable(title=title, rows=causes, is_open=True))
    if consequences:
        title = f"In DeepSpeed's configuration, seeds and the environment: {count(len(consequences), 'key')}"
        tables.append(DifferingTable(title=title, rows=consequences, is_open=not causes))
    return Apart(columns=causes if len(causes) <= MOST_COLUMNS else (), tables=tuple(tables))


def _differing_in(
    names: Sequence[str], each: Sequence[Mapping[str, Settings]]
) -> tuple[DifferingColumn, ...]:
    chosen = [with_sections({name: sections.get(name, {}) for name in names}) for sections in each]
    return tuple(map(_column, differences(chosen)))


def _column(found: DifferingKey) -> DifferingColumn:
    return DifferingColumn(key=found.key, cells=tuple(map(_cell, found.values)))


def _cell(value: str | None) -> DifferingCell:
    if value is None:
        return DifferingCell(value="", text=MISSING)
    with contextlib.suppress(ValueError):
        if len(value) > LONG and math.isfinite(float(value)) and not value.isdigit():
            return DifferingCell(value=value, text=f"{float(value):.6g}")
    return DifferingCell(value=value, text=value)


def alike(runs: Sequence[RunView]) -> dict[str, Settings]:
    """The settings that all runs have, by section; of one run all that it has."""
    first, *others = [sections_of(shown) for shown in runs]
    found = {}
    for title, settings in first.items():
        same = {
            key: setting
            for key, setting in settings.items()
            if all(other.get(title, {}).get(key) == setting for other in others)
        }
        if same:
            found[f"{title}: the same in all" if others else title] = same
    return found


def sections_of(shown: RunView) -> dict[str, Settings]:
    """All that a run was given, and where it ran, by section."""
    around = environment(shown)
    return {**configuration(shown), **({"environment": around} if around else {})}
