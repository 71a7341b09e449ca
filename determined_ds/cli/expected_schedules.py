"""What ``det-ds estimate`` says of the schedules that a pipeline could have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined_ds.config.strategy import Strategy
    from determined_ds.memory.possible_schedules import ScheduleFit

HELD = "held: the most micro-batches, each of one chunk, whose activations a rank holds at a time"


def lines(found: Sequence[ScheduleFit], own: Strategy, width: int) -> list[str]:
    """A table for people; empty without a pipeline.

    Args:
        found: The schedules.
        own: Of the configuration.
        width: Of the terminal.
    """
    from determined_ds.memory.units import format_bytes
    from determined_ds.report.fitted import FittedColumn, FittedRow, fitted, plain

    if not found:
        return []
    columns = [FittedColumn(head=("schedule",), no_room="above")]
    columns += [FittedColumn(head=(head,), align="right") for head in ("chunks", "bubble")]
    columns += [FittedColumn(head=(head,), no_room="below") for head in ("held by rank", "bytes by rank")]
    rows = []
    for each in found:
        mark = " *" if each.strategy == own else ""
        cells = [f"{each.strategy.pipe_schedule}{mark}", f"{each.strategy.pipe_chunks}", f"{each.bubble:.1%}"]
        cells += [_by_rank(map(str, each.most_held))]
        cells += [_by_rank(format_bytes(stage.total_bytes) for stage in each.stages)]
        rows.append(FittedRow(cells=[(cell,) for cell in cells]))
    about = f"schedules of {own.pipe_parallel_size} stages and {own.accumulation} micro-batches"
    notes = [HELD, "bubble: the share of time in which ranks wait, by the schedule alone"]
    return [about, *(plain(line) for line in fitted(columns, rows, width, notes=notes))]


def _by_rank(texts: Any) -> str:
    """One for each rank; of many, the first and the last."""
    every = list(texts)
    return ", ".join(every) if len(every) <= 4 else ", ".join([*every[:2], "...", *every[-2:]])


def as_json(found: Sequence[ScheduleFit], own: Strategy) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "schedule": each.strategy.pipe_schedule,
            "chunks": each.strategy.pipe_chunks,
            "is_configured": each.strategy == own,
            "bubble": each.bubble,
            "most_held": list(each.most_held),
            "stages": [
                {
                    "total_bytes": stage.total_bytes,
                    "activations_bytes": stage.activations_bytes,
                    "model_states_bytes": stage.model_states_bytes,
                }
                for stage in each.stages
            ],
        }
        for each in found
    ]
