"""Recorded runs as one HTML page: what differs, final figures, curves, launches, warnings, configuration."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from determined_ds.protocol.conclusion import COMPLETED
from determined_ds.protocol.handed_on import count
from determined_ds.report.formatting import loss_text
from determined_ds.report.runs.charts import LineChart, charts_of
from determined_ds.report.runs.curves import VALIDATION
from determined_ds.report.runs.drawn_data import drawn_data
from determined_ds.report.runs.figures import duration, figure_columns
from determined_ds.report.runs.given_values import (
    DifferingKey,
    Settings,
    configuration,
    differences,
    environment,
    with_sections,
)
from determined_ds.report.runs.shown import RUNNING, ShownRun
from determined_ds.report.runs.still import StillLine, still_picture
from determined_ds.report.self_contained import self_contained
from determined_ds.report.style import PALETTE
from determined_ds.report.texts import printable

SCRIPTS = ("runs/uPlot.iife.min.js", "page.js", "runs/runs.js")
MISSING = "–"
LONG = 10  # characters of a number
CAUSES, CONSEQUENCES = ("hyperparameters", "decided"), ("DeepSpeed", "environment")
FEW_KEYS = 6  # that differ: a column each, beside a row for each run


def runs_page(runs: Sequence[ShownRun], *, live_s: float | None = None) -> str:
    """The page of one run or several. It loads nothing, and what came from outside is text in it.

    Args:
        runs: At least one; their order gives them their colours.
        live_s: It looks for new data this often; None for a page that is a file.
    """
    charts = charts_of(shown.curves.values() for shown in runs)
    data = drawn_data(runs, charts)
    columns = figure_columns(runs)
    several = len(runs) > 1
    return self_contained(
        "runs/runs.html.jinja",
        SCRIPTS,
        title=printable(_title(runs)),
        verdict=printable(_verdict(runs)),
        facts={} if several else _facts(runs[0]),
        live="" if live_s is None else f"{live_s:g}",
        several=several,
        running=any(shown.status == RUNNING for shown in runs),
        differing=_differing(runs) if several else [],
        columns=columns,
        rows=[
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "status": shown.status,
                "is_odd": shown.status not in (COMPLETED, RUNNING),
                "cells": [column.of(shown) for column in columns],
            }
            for index, shown in enumerate(runs)
        ],
        reasons=[(shown.label, printable(shown.why)) for shown in runs if shown.why],
        charts=[_chart(chart, runs) for chart in charts],
        data=data,
        launches=_launches(runs),
        warnings=_warnings(runs),
        alike=_alike(runs),
        own=_own(runs) if several else [],
        places=f"Read from {', '.join(shown.place for shown in runs)}.",
        json=_json(data.content),
    )


def _json(content: Mapping[str, Any]) -> Markup:
    """JSON that no tag can end, whatever names and texts are in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---------------------------------------------------------------------------------------------- the top


def _title(runs: Sequence[ShownRun]) -> str:
    names = list(dict.fromkeys(shown.run.name for shown in runs))
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return named if len(runs) == 1 else f"{named}: {len(runs)} runs"


def _verdict(runs: Sequence[ShownRun]) -> str:
    """What came out, in one sentence."""
    if len(runs) == 1:
        return _verdict_of_one(runs[0])
    metrics = {shown.metric for shown in runs}
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


def _verdict_of_one(shown: ShownRun) -> str:
    planned = f" of {shown.planned:,}" if shown.planned is not None and shown.status != COMPLETED else ""
    parts = [f"{shown.status.capitalize()}: {shown.steps:,}{planned} batches"]
    if shown.seconds is not None:
        parts[0] += f" in {duration(shown.seconds)}"
    if shown.best is not None:
        parts.append(
            f"best {shown.best.metric} {loss_text(shown.best.value)} after batch {shown.best.steps:,}"
        )
    return "; ".join(parts) + "."


def _facts(shown: ShownRun) -> dict[str, str]:
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
        "to resume": (result.resume or "") if result else "",
        "run directory": shown.place,
    }
    return {name: printable(fact) for name, fact in facts.items()}


def _trained_on(shown: ShownRun) -> str:
    launch = shown.launch
    if launch is None:
        return ""
    kind = {"cpu": "CPU", "cuda": "GPU"}.get(launch.accelerator, launch.accelerator)
    words = f"{count(launch.slots, 'slot')} ({kind})"
    if launch.strategy:
        words += f", {launch.strategy}"
    if launch.global_batch_size:
        words += f", global batch {launch.global_batch_size:,}"
        words += f" = {launch.micro_batch_size} x {launch.accumulation} x {count(launch.replicas, 'replica')}"
    return words


def _machine(shown: ShownRun) -> str:
    facts = dict(shown.launch.machine) if shown.launch else {}
    words = [str(facts[key]) for key in ("host", "processor") if facts.get(key)]
    return ", ".join([*words, *([f"{facts['cores']} cores"] if facts.get("cores") else [])])


def _newest(shown: ShownRun) -> str:
    newest = shown.run.checkpoints[0] if shown.run.checkpoints else None
    return f"{newest.uuid}, batch {newest.steps_completed:,}" if newest else ""


def _date(time: float) -> str:
    at = datetime.fromtimestamp(time).astimezone()
    return f"{at.day} {at:%B %Y, %H:%M:%S %Z}"


# ---------------------------------------------------------------------------------- what differs, what not


def _differing(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
    """Tables of the keys that differ: first the hyperparameters and what was decided, then what follows from them."""
    each = [_sections(shown) for shown in runs]
    tables = []
    for title, names in (("", CAUSES), ("In DeepSpeed's configuration and in the environment", CONSEQUENCES)):
        found = differences(
            [with_sections({name: sections.get(name, {}) for name in names}) for sections in each]
        )
        if found:
            tables.append({"title": f"{title}: {count(len(found), 'key')}", **_difference_table(found, runs)})
    if tables and tables[0]["title"].startswith(":"):
        tables[0]["title"] = ""
    return tables


def _difference_table(found: Sequence[DifferingKey], runs: Sequence[ShownRun]) -> dict[str, Any]:
    """A row for each run where few keys differ, else a row for each key."""
    names, labels = [each.key for each in found], [shown.label for shown in runs]
    table = [[_cell(value) for value in each.values] for each in found]
    if len(found) <= max(FEW_KEYS, len(runs)):
        colours = [index % len(PALETTE) for index in range(len(runs))]
        columns = [list(cells) for cells in zip(*table, strict=True)]
        rows = [
            {"name": label, "colour": colour, "cells": cells}
            for label, colour, cells in zip(labels, colours, columns, strict=True)
        ]
        return {"heads": ["run", *names], "rows": rows}
    rows = [{"name": name, "colour": None, "cells": cells} for name, cells in zip(names, table, strict=True)]
    return {"heads": ["key", *labels], "rows": rows}


def _cell(value: str | None) -> dict[str, str]:
    """A value, and a shorter one to show in its place: ``0.00210485`` for a number that was drawn."""
    if value is None:
        return {"value": "", "text": MISSING}
    with contextlib.suppress(ValueError):
        if len(value) > LONG and math.isfinite(float(value)) and not value.isdigit():
            return {"value": value, "text": f"{float(value):.6g}"}
    return {"value": value, "text": value}


def _alike(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
    """The settings that all runs have, by section; of one run all that it has."""
    first, *others = [_sections(shown) for shown in runs]
    found = []
    for title, settings in first.items():
        same = {
            key: setting
            for key, setting in settings.items()
            if all(other.get(title, {}).get(key, None) == setting for other in others)
        }
        if same:
            found.append({"title": f"{title}: the same in all" if others else title, "settings": same})
    return found


def _own(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
    """All settings of each run, where some of them differ."""
    return [
        {
            "label": shown.label,
            "sections": [
                {"title": title, "settings": settings} for title, settings in _sections(shown).items()
            ],
        }
        for shown in runs
    ]


def _sections(shown: ShownRun) -> dict[str, Settings]:
    found = configuration(shown)
    around = environment(shown)
    return {**found, "environment": around} if around else found


# ------------------------------------------------------------------------------------------- what happened


def _launches(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
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


def _warnings(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
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


def _chart(chart: LineChart, runs: Sequence[ShownRun]) -> dict[str, Any]:
    lines = [
        StillLine(shown.curves[name], index % len(PALETTE))
        for index, shown in enumerate(runs)
        for name in chart.curves
        if name in shown.curves
    ]
    plain = 0
    keys = []
    for name in chart.curves:
        if name.startswith(f"{VALIDATION}/"):
            style = "dots"
        else:
            style, plain = "dashed" if plain else "line", plain + 1
        keys.append({"name": name, "style": style})
    return {"title": chart.title, "still": still_picture(lines, chart.title), "curves": keys}
