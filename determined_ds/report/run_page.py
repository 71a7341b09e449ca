"""Recorded runs as one HTML page: what differs, final figures, curves, launches, configuration.

The way of the data::

    folders -> RunView of each run: curves, figures, settings -> what differs between them -> one page, or JSON
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.comparison import PAGE, RESULTS
from determined_ds.report.live import VALIDATION
from determined_ds.report.numbers import (
    UNKNOWN,
    count,
    date_text,
    duration,
    loss_text,
    number,
    percent,
    printable,
)
from determined_ds.report.runs import RUNNING, RunView, differing, trained_on
from determined_ds.report.style import PALETTE, self_contained
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.records import COMPLETED, SKIPPED, START
from determined_ds.rundir.recoveries import goodput, recoveries_of

RUNS_PAGE = "runs.html"  # beside the report of det-ds compare or autotune
MARK = b'<meta name="generator" content="det-ds report">'
MOST_COLUMNS = 8  # keys that are columns beside the final figures
LONG = 10  # characters of a number
MOST_POINTS = 90_000  # of all curves of a page together: one and a half megabytes
MOST_OF_A_CURVE, LEAST_OF_A_CURVE = 3000, 100
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
    "peak_memory_gib": "peak memory of a rank, GiB",
    "bubble": "share of time that a pipeline's stages wait",
}
TOGETHER = {"learning_rate": "lr", "peak_memory_gib_min": "peak_memory_gib", "bubble_ideal": "bubble"}


class Figure(NamedTuple):
    """A final figure: its heading, the text of a value, what stands below the heading, a tip."""

    head: str
    text: Callable[[float | None], str]
    small: str = ""
    tip: str = ""


FIGURES = {
    "batches": Figure("batches", lambda value: f"{value:,.0f}", "planned"),
    "seconds": Figure("time", duration, tip="time in training: pauses between launches are left out"),
    "loss": Figure("loss", loss_text, "at first", "last training report"),
    "best": Figure("best", loss_text, "after"),
    "samples_per_second": Figure("samples/s", number, tip="median of the reports"),
    "tokens_per_second": Figure("tokens/s", number, tip="median of the reports"),
    "peak_memory_gib": Figure("peak, GiB", number, tip="of the rank that took most"),
}


def page_path(folders: Sequence[Path], output: Path | None) -> Path:
    """Where a page goes: as requested, into the one folder that it is of, or into the current folder.

    Raises:
        ConfigError: there is a file that no ``det-ds report`` has written.
    """
    path = Path(PAGE)
    if output is not None:
        path = output / PAGE if output.is_dir() else output
    elif len(folders) == 1:
        path = folders[0] / (RUNS_PAGE if (folders[0] / RESULTS).is_file() else PAGE)
    if path.is_file() and MARK not in path.read_bytes()[:500]:
        message, fix = "exists, and was not written by det-ds report", "give another --output FILE"
        raise ConfigError(Problem(key="--output", value=str(path), message=message, fix=fix, code="output"))
    return path


def runs_as_json(runs: Sequence[RunView]) -> dict[str, Any]:
    """The runs, whole: no curve is thinned. Numbers that JSON lacks are ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    found = [
        {
            **asdict(replace(shown.run, records=())),
            "recoveries": [each._asdict() for each in recoveries_of(shown.run)],
            "goodput": goodput(shown.run),
            "label": shown.label,
            "path": shown.place,
            "name": shown.run.name,
            "status": shown.status,
            "reason": shown.why,
            "steps_completed": shown.steps,
            "figures": shown.figures,
            "best": shown.best and shown.best._asdict(),
            "configuration": {
                name: {key: setting._asdict() for key, setting in settings.items()}
                for name, settings in shown.sections.items()
            },
            "curves": {
                name: {"steps": curve.steps, "seconds": curve.seconds, "values": curve.values}
                for name, curve in shown.curves.items()
            },
        }
        for shown in runs
    ]
    differs = differing(runs, "decided", "hyperparameters", "DeepSpeed")
    differs |= {f"environment.{key}": values for key, values in differing(runs, "environment").items()}
    labels = [shown.label for shown in runs]
    by_label = {key: dict(zip(labels, values, strict=True)) for key, values in differs.items()}
    return dict(jsonable({"runs": found, "differs": by_label}))


def save_page(runs: Sequence[RunView], path: Path) -> int:
    """Write the page of one run or several. It loads nothing, and what came from outside is text in it.

    Args:
        runs: At least one; their order gives them their colours.
        path: Of the file, which is whole at any moment.

    Returns:
        Its bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    charts, (drawn, thinned) = _charts(runs), _drawn(runs)
    text = json.dumps({"runs": drawn, "charts": charts}, separators=(",", ":"), allow_nan=False)
    for char in "&<>":  # no tag can end it, whatever names and texts are in it
        text = text.replace(char, f"\\u{ord(char):04x}")

    # What differs: first the hyperparameters and what was decided, as columns; then what follows from them.
    differs = differing(runs, "hyperparameters", "decided")
    columns = list(differs)[:MOST_COLUMNS]
    differs |= differing(runs, "DeepSpeed", "environment")
    first, *rest = [shown.sections for shown in runs]
    alike: dict[str, Any] = {}
    for title, settings in first.items():
        same = {k: v for k, v in settings.items() if all(each.get(title, {}).get(k) == v for each in rest)}
        alike |= {f"{title}: the same in all" if rest else title: same} if same else {}
    names = list(dict.fromkeys(shown.run.name for shown in runs))
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    metrics = {shown.metric for shown in runs if shown.metric}
    figures = {k: v for k, v in FIGURES.items() if any(shown.figures[k] is not None for shown in runs)}
    if "best" in figures:
        metric = metrics.pop() if len(metrics) == 1 else "validation"
        figures["best"] = figures["best"]._replace(head=f"best {metric}")
    page = self_contained(
        "runs.html.jinja",
        ["uPlot.iife.min.js", "sort.js", "runs.js"],
        title=printable(f"{named}: {len(runs)} runs" if rest else named),
        verdict=printable(_verdict(runs)),
        facts={} if rest else _facts(runs[0]),
        runs=runs,
        fine=(COMPLETED, RUNNING),
        columns=columns,
        differs=differs,
        cut=_cut,
        figures=figures,
        below=_below,
        unknown=UNKNOWN,
        charts=[chart["title"] for chart in charts],
        thinned=thinned,
        date=lambda time: date_text(datetime.fromtimestamp(time).astimezone()),
        count=count,
        duration=duration,
        recoveries=[(shown, rows) for shown in runs if (rows := recoveries_of(shown.run))],
        printable=printable,
        alike=alike,
        json=Markup(text),
    )
    write_files({path: page}, overwrite=True)
    return len(page.encode())


def _verdict(runs: Sequence[RunView]) -> str:
    """What came out, in one sentence."""
    if len(runs) == 1:
        shown, seconds = runs[0], runs[0].figures["seconds"]
        planned = f" of {shown.planned:,}" if shown.planned and shown.steps < shown.planned else ""
        text = f"{shown.status.capitalize()}: {shown.steps:,}{planned} batches"
        text += f" in {duration(seconds)}" if seconds is not None else ""
        if best := shown.best:
            text += f"; best {best.metric} {loss_text(best.value)} after batch {best.steps:,}"
        return f"{text}."
    training = sum(shown.status == RUNNING for shown in runs)
    left = f" {count(training, 'run')} of {len(runs)} still training." if training else ""
    known = [(best, shown) for shown in runs if (best := shown.best) is not None]
    if len({best.metric for best, _ in known}) != 1:
        return f"{len(runs)} runs.{left}"
    sign = 1 if runs[0].smaller_is_better else -1
    best, shown = min(known, key=lambda pair: sign * pair[0].value)
    return f"Best {best.metric} {loss_text(best.value)}: {shown.label}, after batch {best.steps:,}.{left}"


def _facts(shown: RunView) -> dict[str, str]:
    """Of a page of one run; those that are not known are left out."""
    launch, result, found = shown.launch, shown.run.result, {}
    if launch is not None:
        words = [str(launch.machine[key]) for key in ("host", "processor") if launch.machine.get(key)]
        words += [f"{launch.machine['cores']} cores"] if launch.machine.get("cores") else []
        started = date_text(datetime.fromtimestamp(shown.run.launches[0].time).astimezone())
        found = {"command": launch.command, "runs": launch.runs, "started": started}
        found |= {"trained on": trained_on(shown.run), "machine": ", ".join(words)}
    if shown.run.checkpoints:
        newest = shown.run.checkpoints[0]
        found["newest checkpoint"] = f"{newest.uuid}, batch {newest.steps_completed:,}"
    if recoveries_of(shown.run) and (share := goodput(shown.run)) is not None:
        found["goodput"] = f"{percent(share)} of the time was training that counted"
    found["best checkpoint"] = str((result.best or {}).get("checkpoint") or "") if result else ""
    found |= {"to resume": shown.run.resume or "", "run directory": shown.place}
    return {name: printable(fact) for name, fact in found.items() if fact}


def _below(shown: RunView, figure: str) -> str:
    """What stands below a figure of a run."""
    if figure == "batches" and shown.planned is not None:
        return f"of {shown.planned:,}"
    if figure == "loss" and shown.losses:
        return f"from {loss_text(shown.losses[0])}"
    return f"batch {shown.best.steps:,}" if figure == "best" and shown.best else ""


def _cut(value: str) -> str:
    """A value that differs, as it is shown: a long number is cut."""
    with contextlib.suppress(ValueError):
        if len(value) > LONG and math.isfinite(float(value)) and not value.isdigit():
            return f"{float(value):.6g}"
    return value


# ---------------------------------------------------------------------------------------------- curves


def _charts(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Titles and curves of the pictures: the loss, all else that is validated, how training went, what remains."""
    found: dict[str, list[str]] = {}
    for name, metric in {name: curve.metric for each in runs for name, curve in each.curves.items()}.items():
        prefix = next((each for each in PREFIXES if metric.startswith(each) and metric != each), "")
        metric = metric.removeprefix(prefix)  # val_loss, train_loss and loss are loss
        found.setdefault(TOGETHER.get(metric, metric), []).append(name)

    def place(metric: str) -> tuple[int, int, str]:
        if metric in TITLES:
            return (0, 0, "") if metric == "loss" else (2, list(TITLES).index(metric), "")
        return (1 if any(name.startswith(f"{VALIDATION}/") for name in found[metric]) else 3, 0, metric)

    return [{"title": TITLES.get(at, at), "curves": found[at]} for at in sorted(found, key=place)]


def _drawn(runs: Sequence[RunView]) -> tuple[list[dict[str, Any]], str]:
    """What the page's script draws of each run: curves with fewer points, and marks; and what is left out.

    Of a curve ``s`` are batches, ``t`` seconds, ``v`` values.
    """
    most = MOST_POINTS // max(1, sum(len(shown.curves) for shown in runs))
    most = max(LEAST_OF_A_CURVE, min(MOST_OF_A_CURVE, most))
    drawn, kept, reported = [], 0, 0
    for index, shown in enumerate(runs):
        curves = {}
        for name, curve in shown.curves.items():
            # Validations are exact: they are left out only where there are thousands.
            exact = curve.group == VALIDATION
            indexes = _thinned(curve.values, MOST_OF_A_CURVE if exact else most)
            if reported < len(curve.values) > len(indexes):
                kept, reported = len(indexes), len(curve.values)
            values = [curve.values[at] for at in indexes]
            if not exact:
                values = [float(f"{value:.6g}") if math.isfinite(value) else value for value in values]
            curves[name] = {"s": [curve.steps[at] for at in indexes], "v": jsonable(values)}
            times = [curve.seconds[at] for at in indexes]
            curves[name] |= {} if None in times else {"t": times}
        launches = [each for each in shown.run.launches if each.kind != START]
        drawn.append(
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "samples": shown.launch.global_batch_size if shown.launch else 0,
                "marks": [
                    *({"text": launch.kind, "step": launch.steps_completed} for launch in launches),
                    *(
                        {
                            "text": "without {skipped_first} to {skipped_last}".format(**each["metrics"]),
                            "step": each["steps_completed"],
                        }
                        for each in shown.run.of_group(SKIPPED)
                    ),
                ],
                "checkpoints": [each.steps_completed for each in reversed(shown.run.checkpoints)],
                "curves": curves,
            }
        )
    return drawn, f"{kept:,} of its {reported:,} points" if kept else ""


def _thinned(values: Sequence[float], most: int) -> list[int]:
    """The indexes of about ``most`` points to draw of a long curve: its ends, and extremes of equal parts."""
    num = len(values)
    if num <= most:
        return list(range(num))
    parts, kept = max(1, (most - 2) // 2), {0, num - 1}
    for part in range(parts):
        indexes = range(part * num // parts, (part + 1) * num // parts)
        finite = [index for index in indexes if math.isfinite(values[index])]
        kept.update([index for index in indexes if not math.isfinite(values[index])][:1])
        if finite:
            kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
    return sorted(kept)
