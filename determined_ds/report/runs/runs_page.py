"""Recorded runs as one HTML page: what differs, final figures, curves, launches, warnings, configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from markupsafe import Markup

from determined_ds.report.formatting import loss_text
from determined_ds.report.layer_section import partition_section
from determined_ds.report.profile_section import profile_section
from determined_ds.report.runs.curves import VALIDATION
from determined_ds.report.runs.differing import alike, differing, sections_of
from determined_ds.report.runs.drawn_data import MOST_PARTS, drawn_data
from determined_ds.report.runs.final_figures import duration, figure_columns
from determined_ds.report.runs.line_charts import LineChart, charts_of
from determined_ds.report.runs.run_view import RUNNING, RunView
from determined_ds.report.self_contained import self_contained
from determined_ds.report.style import PALETTE
from determined_ds.report.terminal.closing import closing_block
from determined_ds.report.texts import printable
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.records import COMPLETED

SCRIPTS = ("runs/uPlot.iife.min.js", "page.js", "runs/runs.js")


def runs_page(runs: Sequence[RunView]) -> str:
    """The page of one run or several. It loads nothing, and what came from outside is text in it.

    Args:
        runs: At least one; their order gives them their colours.
    """
    charts = charts_of(shown.curves.values() for shown in runs)
    data = drawn_data(runs, charts)
    columns = figure_columns(runs)
    several = len(runs) > 1
    apart = differing(runs)
    return self_contained(
        "runs/runs.html.jinja",
        SCRIPTS,
        title=printable(_title(runs)),
        verdict=printable(_verdict(runs)),
        facts={} if several else _facts(runs[0]),
        several=several,
        running=any(shown.status == RUNNING for shown in runs),
        apart=apart,
        columns=columns,
        rows=[
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "status": shown.status,
                "is_odd": shown.status not in (COMPLETED, RUNNING),
                "differing": [column.cells[index] for column in apart.columns],
                "cells": [column.of(shown) for column in columns],
            }
            for index, shown in enumerate(runs)
        ],
        reasons=[(shown.label, printable(shown.why)) for shown in runs if shown.why],
        charts=[_chart(chart, runs) for chart in charts],
        data=data,
        parts=MOST_PARTS,
        blocks=_blocks(runs),
        profiles=_profiles(runs),
        partitions=_partitions(runs),
        launches=_launches(runs),
        warnings=_warnings(runs),
        alike=alike(runs),
        own=[{"label": shown.label, "sections": sections_of(shown)} for shown in runs] if several else [],
        places=f"Read from {', '.join(shown.place for shown in runs)}.",
        json=_json(data.content),
    )


def _json(content: Mapping[str, Any]) -> Markup:
    """JSON that no tag can end, whatever names and texts are in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---------------------------------------------------------------------------------------------- the top


def _title(runs: Sequence[RunView]) -> str:
    names = list(dict.fromkeys(shown.run.name for shown in runs))
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return named if len(runs) == 1 else f"{named}: {len(runs)} runs"


def _verdict(runs: Sequence[RunView]) -> str:
    """What came out, in one sentence."""
    if len(runs) == 1:
        return _verdict_of_one(runs[0])
    metrics = {shown.metric for shown in runs if shown.metric}
    known = [(best, shown) for shown in runs if (best := shown.best) is not None]
    open_ = sum(shown.status == RUNNING for shown in runs)
    left = (
        f" {count(open_, 'run')} of {len(runs)} still {'trains' if open_ == 1 else 'train'}." if open_ else ""
    )
    if len(metrics) != 1 or not known:
        return f"{len(runs)} runs.{left}"
    sign = 1 if runs[0].smaller_is_better else -1
    best, shown = min(known, key=lambda pair: sign * pair[0].value)
    return f"Best {best.metric} {loss_text(best.value)}: {shown.label}, after batch {best.steps:,}.{left}"


def _verdict_of_one(shown: RunView) -> str:
    planned = f" of {shown.planned:,}" if shown.planned is not None and shown.status != COMPLETED else ""
    parts = [f"{shown.status.capitalize()}: {shown.steps:,}{planned} batches"]
    if shown.seconds is not None:
        parts[0] += f" in {duration(shown.seconds)}"
    if shown.best is not None:
        parts.append(
            f"best {shown.best.metric} {loss_text(shown.best.value)} after batch {shown.best.steps:,}"
        )
    return "; ".join(parts) + "."


def _facts(shown: RunView) -> dict[str, str]:
    """Of a page of one run."""
    launch, result = shown.launch, shown.run.result
    best = result.best if result else None
    facts = {
        "command": launch.command if launch else "",
        "runs": launch.runs if launch else "",
        "started": _date(shown.run.launches[0].time) if launch else "",
        "trained on": _trained_on(shown),
        "machine": _machine(shown),
        "best checkpoint": str(best.get("checkpoint") or "") if best else "",
        "newest checkpoint": _newest(shown),
        "to resume": shown.run.resume or "",
        "run directory": shown.place,
    }
    return {name: printable(fact) for name, fact in facts.items()}


def _trained_on(shown: RunView) -> str:
    launch = shown.launch
    if launch is None:
        return ""
    kind = {"cpu": "CPU", "cuda": "GPU"}.get(launch.accelerator, launch.accelerator)
    words = count(launch.slots, "slot") + (f" ({kind})" if kind else "")
    if launch.strategy:
        words += f", {launch.strategy}"
    if launch.global_batch_size:
        words += f", global batch {launch.global_batch_size:,}"
    if launch.replicas:
        words += f" = {launch.micro_batch_size} x {launch.accumulation} x {count(launch.replicas, 'replica')}"
    return words


def _machine(shown: RunView) -> str:
    facts = dict(shown.launch.machine) if shown.launch else {}
    words = [str(facts[key]) for key in ("host", "processor") if facts.get(key)]
    return ", ".join([*words, *([f"{facts['cores']} cores"] if facts.get("cores") else [])])


def _newest(shown: RunView) -> str:
    newest = shown.run.checkpoints[0] if shown.run.checkpoints else None
    return f"{newest.uuid}, batch {newest.steps_completed:,}" if newest else ""


def _date(time: float) -> str:
    at = datetime.fromtimestamp(time).astimezone()
    return f"{at.day} {at:%B %Y, %H:%M:%S %Z}"


# ------------------------------------------------------------------------------------------- what happened


def _blocks(runs: Sequence[RunView]) -> list[tuple[str, str]]:
    """What det-ds run prints at its end, of each run of this machine that has ended."""
    ended = [shown for shown in runs if shown.status != RUNNING and shown.run.path.is_dir()]
    blocks = [(shown.label, "\n".join(map(_visible, closing_block(shown.run)))) for shown in ended]
    return [(label, lines) for label, lines in blocks if lines]


def _profiles(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """What profiles have found, of each run that was profiled."""
    found = [(shown.label, profile_section(shown.run.path, f"profile{at}")) for at, shown in enumerate(runs)]
    return [{"label": label, **section} for label, section in found if section]


def _partitions(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """How layers are shared out, of each pipeline that has measured them."""
    found = [
        (shown.label, partition_section(shown.run.path, f"partition{at}")) for at, shown in enumerate(runs)
    ]
    return [{"label": label, **section} for label, section in found if section]


def _visible(line: str) -> str:
    """A line with its spaces, and with what a terminal would obey written out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def _launches(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Of all runs, where any was launched more than once."""
    if all(len(shown.run.launches) < 2 for shown in runs):
        return []
    return [
        {
            "label": shown.label,
            "when": _date(launch.time),
            "kind": launch.kind,
            "steps": launch.steps_completed,
            "slots": launch.slots,
            "strategy": launch.strategy,
            "reason": printable(launch.reason),
        }
        for shown in runs
        for launch in shown.run.launches
    ]


def _warnings(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Those about the configuration, then those of ranks."""
    rows = []
    for shown in runs:
        said = dict.fromkeys(text for launch in shown.run.launches for text in launch.warnings)
        rows += [
            {
                "label": shown.label,
                "message": text,
                "source": "configuration",
                "count": 1,
                "first": "",
                "ranks": "",
            }
            for text in said
        ]
        rows += [
            {
                "label": shown.label,
                "message": each.message,
                "source": each.source if each.level == "WARNING" else f"{each.level}  {each.source}",
                "count": f"{each.count:,}",
                "first": f"batch {each.steps_completed:,}" if each.steps_completed else "the start",
                "ranks": ", ".join(map(str, each.ranks)),
            }
            for each in shown.warnings
        ]
    return rows


# ---------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class _Key:
    """How a curve of a chart is drawn: ``line``, ``dashed`` or ``dots``, in which of the page's colours."""

    name: str
    style: str
    colour: int


def _chart(chart: LineChart, runs: Sequence[RunView]) -> dict[str, Any]:
    """Its key. Several metrics of one run differ in colour, those of several runs in dashes."""
    keys: list[_Key] = []
    for name in chart.curves:
        if name.startswith(f"{VALIDATION}/"):
            keys.append(_Key(name, "dots", 0))
        else:
            place = sum(key.style != "dots" for key in keys)
            keys.append(_Key(name, "dashed" if place and len(runs) > 1 else "line", place % len(PALETTE)))
    return {"title": chart.title, "curves": keys}
