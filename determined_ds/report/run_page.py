"""Recorded runs as one HTML page: what differs, final figures, curves, launches, warnings, configuration.

The way of the data::

    folders -> RunView of each run: curves, figures, settings -> what differs between them -> one page, or JSON
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from determined_ds.config.params import TRIAL_SEED
from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.partition import in_words, read_partition
from determined_ds.report.charts import partition_picture, profile_picture
from determined_ds.report.closing import closing_block
from determined_ds.report.comparison import PAGE, RESULTS
from determined_ds.report.gantt import step_picture
from determined_ds.report.numbers import (
    UNKNOWN,
    count,
    duration,
    loss_text,
    number,
    percent,
    printable,
    seconds_text,
)
from determined_ds.report.page import can_draw, markup_of, self_contained
from determined_ds.report.results import PROFILE_DIR, PROFILE_JSON
from determined_ds.report.runs import LOSSES, RUNNING, VALIDATION, Curve, RunView, Settings, differing
from determined_ds.report.style import PALETTE
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.recorded_step import read_step
from determined_ds.rundir.records import COMPLETED, START
from determined_ds.rundir.run_dir import RunDir

RUNS_PAGE = "runs.html"  # beside the report of det-ds compare or autotune
MARK = b'<meta name="generator" content="det-ds report">'
HEAD_BYTES = 500
SCRIPTS = ("uPlot.iife.min.js", "sort.js", "runs.js")
MOST_COLUMNS = 8  # keys that are columns beside the final figures
LONG = 10  # characters of a number
MOST_POINTS = 90_000  # of all curves of a page together: one and a half megabytes
MOST_OF_A_CURVE, LEAST_OF_A_CURVE = 3000, 100
MOST_PARTS, POINTS_OF_A_PART, LEAST_SMOOTHED = 150, 5, 20
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
    "bubble": "share of time that a pipeline's stages wait",
}
TOGETHER = {
    "learning_rate": "lr",
    "peak_memory_gib": "peak_memory",
    "peak_memory_gib_min": "peak_memory",
    "bubble_ideal": "bubble",
}


def page_path(folders: Sequence[Path], output: Path | None) -> Path:
    """Where a page goes: as requested, into the one folder that it is of, or into the current folder.

    Raises:
        ConfigError: there is a file that no ``det-ds report`` has written.
    """
    if output is not None:
        path = output / PAGE if output.is_dir() else output
    elif len(folders) == 1:
        path = folders[0] / (RUNS_PAGE if (folders[0] / RESULTS).is_file() else PAGE)
    else:
        path = Path(PAGE)
    if path.is_file() and MARK not in path.read_bytes()[:HEAD_BYTES]:
        message, fix = "exists, and was not written by det-ds report", "give another --output FILE"
        raise ConfigError(Problem(key="--output", value=str(path), message=message, fix=fix, code="output"))
    return path


def save_page(runs: Sequence[RunView], path: Path) -> int:
    """Write the page, whole at any moment. Returns its bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    text = runs_page(runs)
    write_files({path: text}, overwrite=True)
    return len(text.encode())


def runs_as_json(runs: Sequence[RunView]) -> dict[str, Any]:
    """The runs, whole: no curve is thinned. Numbers that JSON lacks are ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    of_launch = ("time", "kind", "reason", "slots", "steps_completed", "checkpoint")
    found = []
    for shown in runs:
        run, sections = shown.run, dict(shown.sections)
        around = sections.pop("environment", {})
        found.append(
            {
                "label": shown.label,
                "path": shown.place,
                "name": run.name,
                "status": shown.status,
                "reason": shown.why,
                "steps_completed": shown.steps,
                "figures": shown.figures(),
                "best": shown.best._asdict() if shown.best else None,
                "result": asdict(run.result) if run.result else None,
                "configuration": {
                    section: {key: setting._asdict() for key, setting in settings.items()}
                    for section, settings in sections.items()
                },
                "environment": {key: setting.value for key, setting in around.items()},
                "launches": [{key: getattr(each, key) for key in of_launch} for each in run.launches],
                "checkpoints": [
                    {"uuid": each.uuid, "steps_completed": each.steps_completed} for each in run.checkpoints
                ],
                "warnings": [asdict(each) for each in shown.warnings],
                "curves": {
                    name: {"steps": curve.steps, "seconds": curve.seconds, "values": curve.values}
                    for name, curve in shown.curves.items()
                },
            }
        )
    labels = [shown.label for shown in runs]
    differs = {
        key: dict(zip(labels, values, strict=True))
        for key, values in differing(runs, "decided", "hyperparameters", "DeepSpeed").items()
    }
    for key, values in differing(runs, "environment").items():
        differs[f"environment.{key}"] = dict(zip(labels, values, strict=True))
    content: dict[str, Any] = jsonable({"runs": found, "differs": differs})
    return content


def runs_page(runs: Sequence[RunView]) -> str:
    """The page of one run or several. It loads nothing, and what came from outside is text in it.

    Args:
        runs: At least one; their order gives them their colours.
    """
    several = len(runs) > 1
    charts = _charts(runs)
    content, thinned = _drawn(runs, charts)
    columns, tables = _differing(runs)
    figures = _figures(runs)
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for char in "&<>":  # no tag can end it, whatever names and texts are in it
        text = text.replace(char, f"\\u{ord(char):04x}")
    return self_contained(
        "runs.html.jinja",
        SCRIPTS,
        title=printable(_title(runs)),
        verdict=printable(_verdict(runs)),
        facts={} if several else _facts(runs[0]),
        several=several,
        running=any(shown.status == RUNNING for shown in runs),
        differing_columns=columns,
        differing_tables=tables,
        columns=[head for head, _ in figures],
        rows=[
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "status": shown.status,
                "is_odd": shown.status not in (COMPLETED, RUNNING),
                "differing": [cells[index] for cells in columns.values()],
                "cells": [cells[index] for _, cells in figures],
            }
            for index, shown in enumerate(runs)
        ],
        charts=[(title, _keys(names, several)) for title, names in charts.items()],
        thinned=thinned,
        parts=MOST_PARTS,
        profiles=_of_each(runs, "profile", _profile),
        partitions=_of_each(runs, "partition", _partition),
        blocks=_of_each(runs, "ended", _block),
        runs=runs,
        was_relaunched=any(len(shown.run.launches) > 1 for shown in runs),
        date=_date,
        printable=printable,
        alike=_alike(runs),
        json=Markup(text),
    )


# ---------------------------------------------------------------------------------------------- the top


def _title(runs: Sequence[RunView]) -> str:
    names = list(dict.fromkeys(shown.run.name for shown in runs))
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return named if len(runs) == 1 else f"{named}: {len(runs)} runs"


def _verdict(runs: Sequence[RunView]) -> str:
    """What came out, in one sentence."""
    if len(runs) == 1:
        shown = runs[0]
        planned = f" of {shown.planned:,}" if shown.planned is not None and shown.status != COMPLETED else ""
        text = f"{shown.status.capitalize()}: {shown.steps:,}{planned} batches"
        text += f" in {duration(shown.seconds)}" if shown.seconds is not None else ""
        if best := shown.best:
            text += f"; best {best.metric} {loss_text(best.value)} after batch {best.steps:,}"
        return f"{text}."
    metrics = {shown.metric for shown in runs if shown.metric}
    known = [(best, shown) for shown in runs if (best := shown.best) is not None]
    training = sum(shown.status == RUNNING for shown in runs)
    verb = "trains" if training == 1 else "train"
    left = f" {count(training, 'run')} of {len(runs)} still {verb}." if training else ""
    if len(metrics) != 1 or not known:
        return f"{len(runs)} runs.{left}"
    sign = 1 if runs[0].smaller_is_better else -1
    best, shown = min(known, key=lambda pair: sign * pair[0].value)
    return f"Best {best.metric} {loss_text(best.value)}: {shown.label}, after batch {best.steps:,}.{left}"


def _facts(shown: RunView) -> dict[str, str]:
    """Of a page of one run."""
    launch, result = shown.launch, shown.run.result
    newest = shown.run.checkpoints[0] if shown.run.checkpoints else None
    trained_on = machine = ""
    if launch is not None:
        kind = {"cpu": "CPU", "cuda": "GPU"}.get(launch.accelerator, launch.accelerator)
        trained_on = count(launch.slots, "slot") + (f" ({kind})" if kind else "")
        trained_on += f", {launch.strategy}" if launch.strategy else ""
        trained_on += f", global batch {launch.global_batch_size:,}" if launch.global_batch_size else ""
        if launch.replicas:
            replicas = count(launch.replicas, "replica")
            trained_on += f" = {launch.micro_batch_size} x {launch.accumulation} x {replicas}"
        facts = dict(launch.machine)
        words = [str(facts[key]) for key in ("host", "processor") if facts.get(key)]
        machine = ", ".join([*words, *([f"{facts['cores']} cores"] if facts.get("cores") else [])])
    found = {
        "command": launch.command if launch else "",
        "runs": launch.runs if launch else "",
        "started": _date(shown.run.launches[0].time) if launch else "",
        "trained on": trained_on,
        "machine": machine,
        "best checkpoint": str((result.best or {}).get("checkpoint") or "") if result else "",
        "newest checkpoint": f"{newest.uuid}, batch {newest.steps_completed:,}" if newest else "",
        "to resume": shown.run.resume or "",
        "run directory": shown.place,
    }
    return {name: printable(fact) for name, fact in found.items()}


def _date(time: float) -> str:
    at = datetime.fromtimestamp(time).astimezone()
    return f"{at.day} {at:%B %Y, %H:%M:%S %Z}"


def _figures(runs: Sequence[RunView]) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """The columns of final figures of which any run knows something: a heading, and the cell of each run."""
    metrics = list(dict.fromkeys(shown.metric for shown in runs if shown.metric))
    best = f"best {metrics[0]}" if len(metrics) == 1 else "best validation"
    heads: dict[str, tuple[str, str, str, Callable[[float | None], str]]] = {
        "batches": ("batches", "planned", "", lambda value: f"{value:,.0f}"),
        "seconds": ("time", "", "time in training: pauses between launches are left out", duration),
        "loss": ("loss", "at first", "last training report", loss_text),
        "best": (best, "after", "", loss_text),
        "samples_per_second": ("samples/s", "", "median of the reports", number),
        "tokens_per_second": ("tokens/s", "", "median of the reports", number),
        "peak_memory_gib": ("peak, GiB", "", "of the rank that took most", number),
    }
    below: dict[str, Callable[[RunView], str]] = {
        "batches": lambda shown: f"of {shown.planned:,}" if shown.planned is not None else "",
        "loss": lambda shown: (
            f"from {loss_text(shown.training(*LOSSES)[0])}" if shown.training(*LOSSES) else ""
        ),
        "best": lambda shown: f"batch {shown.best.steps:,}" if shown.best else "",
    }
    values = [shown.figures() for shown in runs]
    found = []
    for name, (head, small, tip, as_text) in heads.items():
        if any(each[name] is not None for each in values):
            cells = [
                {
                    "text": UNKNOWN if each[name] is None else as_text(each[name]),
                    "small": below[name](shown) if name in below else "",
                    "value": each[name],
                }
                for shown, each in zip(runs, values, strict=True)
            ]
            found.append(({"head": head, "small": small, "tip": tip}, cells))
    return found


# ---------------------------------------------------------------------------------------------- what differs

Cells = list[tuple[str, str]]  # of each run: the value, whole, to sort by, and as it is shown


def _differing(runs: Sequence[RunView]) -> tuple[dict[str, Cells], list[tuple[str, bool, dict[str, Cells]]]]:
    """Key -> cells: the columns beside the final figures, and tables of the others: a title, and whether it is open.

    First the hyperparameters and what was decided, then what follows from them.
    """
    causes, consequences = (
        {key: [_cell(value) for value in values] for key, values in differing(runs, *sections).items()}
        for sections in (("hyperparameters", "decided"), ("DeepSpeed", "environment"))
    )
    if len(causes) > 1 and TRIAL_SEED in causes:  # in a search seeds always differ, and matter least
        consequences[TRIAL_SEED] = causes.pop(TRIAL_SEED)
    tables = []
    if len(causes) > MOST_COLUMNS:
        tables.append((f"Hyperparameters and what was decided: {count(len(causes), 'key')}", True, causes))
    if consequences:
        title = f"In DeepSpeed's configuration, seeds and the environment: {count(len(consequences), 'key')}"
        tables.append((title, not causes, consequences))
    return causes if len(causes) <= MOST_COLUMNS else {}, tables


def _cell(value: str | None) -> tuple[str, str]:
    if value is None:
        return "", UNKNOWN
    try:
        is_long = len(value) > LONG and math.isfinite(float(value)) and not value.isdigit()
    except ValueError:
        is_long = False
    return value, f"{float(value):.6g}" if is_long else value


def _alike(runs: Sequence[RunView]) -> dict[str, Settings]:
    """The settings that all runs have, by section; of one run all that it has."""
    first, *others = [shown.sections for shown in runs]
    found = {}
    for title, settings in first.items():
        same = {k: v for k, v in settings.items() if all(each.get(title, {}).get(k) == v for each in others)}
        if same:
            found[f"{title}: the same in all" if others else title] = same
    return found


# ---------------------------------------------------------------------------------------------- curves


def _charts(runs: Sequence[RunView]) -> dict[str, list[str]]:
    """Title -> names of the curves in it: a metric's training and its validation are in one picture.

    The loss first, then all else that is validated, then how training went, then what remains.
    """
    found: dict[str, dict[str, Curve]] = {}
    for shown in runs:
        for name, curve in shown.curves.items():
            metric = curve.metric
            prefix = next((each for each in PREFIXES if metric.startswith(each) and metric != each), "")
            metric = metric.removeprefix(prefix)  # val_loss, train_loss and loss are loss
            found.setdefault(TOGETHER.get(metric, metric), {}).setdefault(name, curve)

    def place(metric: str) -> tuple[int, int, str]:
        if metric in TITLES:
            return (0, 0, "") if metric == "loss" else (2, list(TITLES).index(metric), "")
        return (1 if any(each.group == VALIDATION for each in found[metric].values()) else 3, 0, metric)

    return {TITLES.get(metric, metric): list(found[metric]) for metric in sorted(found, key=place)}


def _keys(names: Sequence[str], several: bool) -> list[tuple[str, str, int]]:
    """How a picture's curves are drawn: ``line``, ``dashed`` or ``dots``, in which of the page's colours.

    Several metrics of one run differ in colour, those of several runs in dashes.
    """
    keys: list[tuple[str, str, int]] = []
    place = 0
    for name in names:
        if name.startswith(f"{VALIDATION}/"):
            keys.append((name, "dots", 0))
        else:
            keys.append((name, "dashed" if place and several else "line", place % len(PALETTE)))
            place += 1
    return keys


def _drawn(runs: Sequence[RunView], charts: Mapping[str, list[str]]) -> tuple[dict[str, Any], str]:
    """What the page's script draws: curves with fewer points, marks, which picture holds what; and what is left out."""
    num_curves = sum(len(shown.curves) for shown in runs)
    most = max(LEAST_OF_A_CURVE, min(MOST_OF_A_CURVE, MOST_POINTS // max(1, num_curves)))
    drawn: list[dict[str, Any]] = []
    kept, reported = 0, 0
    for index, shown in enumerate(runs):
        curves = {}
        for name, curve in shown.curves.items():
            # Validations are exact: they are left out only where there are thousands.
            indexes = thinned(curve.values, MOST_OF_A_CURVE if curve.group == VALIDATION else most)
            if reported < len(curve.values) > len(indexes):
                kept, reported = len(indexes), len(curve.values)
            curves[name] = {**_compact(curve.taken(indexes)), **_smooth(curve)}
        longest = max(shown.curves.values(), key=lambda curve: len(curve.steps), default=None)
        checkpoints = []
        for each in reversed(shown.run.checkpoints):  # with the time of the last report before it
            at = bisect_right(longest.steps, each.steps_completed) - 1 if longest else -1
            seconds = longest.seconds[at] if longest and at >= 0 else None
            checkpoints.append({"step": each.steps_completed, "seconds": seconds})
        marks = [
            {"text": launch.kind, "step": launch.steps_completed, "seconds": seconds}
            for launch, seconds in zip(shown.run.launches, shown.starts, strict=False)
            if launch.kind != START
        ]
        drawn.append(
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "samples": shown.launch.global_batch_size if shown.launch else 0,
                "marks": marks,
                "checkpoints": checkpoints,
                "curves": curves,
            }
        )
    content = {
        "runs": drawn,
        "charts": [{"title": title, "curves": names} for title, names in charts.items()],
    }
    if not kept:
        return content, ""
    return content, (
        f"The longest curve is drawn with {kept:,} of its {reported:,} points: the lowest and the highest of each part."
        " Validations are exact, except where there are thousands. All values are in metrics.jsonl."
    )


def thinned(values: Sequence[float], most: int) -> list[int]:
    """The indexes of the points to draw of a long curve, rising.

    The curve is cut into parts of equal length; of each part the lowest and the highest point stay, and the first one
    that is not finite. So do the curve's first and last point.

    Args:
        values: Of the curve, in their order.
        most: About how many points to keep, at least 4.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    parts = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for part in range(parts):
        indexes = range(part * count // parts, (part + 1) * count // parts)
        finite = [index for index in indexes if math.isfinite(values[index])]
        kept.update(next(([index] for index in indexes if not math.isfinite(values[index])), []))
        if finite:
            kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
    return sorted(kept)


def _compact(curve: Curve) -> dict[str, list[Any]]:
    """``s``: batches, ``t``: seconds, ``v``: values."""
    exact = curve.group == VALIDATION
    values = [value if exact or not math.isfinite(value) else float(f"{value:.6g}") for value in curve.values]
    times = [round(seconds, 2) for seconds in curve.seconds if seconds is not None]
    return {
        "s": curve.steps,
        "v": jsonable(values),
        **({"t": times} if len(times) == len(curve.steps) else {}),
    }


def _smooth(curve: Curve) -> dict[str, Any]:
    """``m``: the means of equal parts of a whole training curve, each at its last point."""
    count = len(curve.values)
    if curve.group == VALIDATION or count < LEAST_SMOOTHED:
        return {}
    parts = min(MOST_PARTS, count // POINTS_OF_A_PART)
    ends = [(part + 1) * count // parts for part in range(parts)]
    means = []
    for start, end in zip([0, *ends], ends, strict=False):
        finite = [value for value in curve.values[start:end] if math.isfinite(value)]
        means.append(sum(value / len(finite) for value in finite) if finite else math.nan)
    return {"m": _compact(replace(curve.taken([end - 1 for end in ends]), values=means))}


# ------------------------------------------------------------------------------------------- what happened


def _of_each(
    runs: Sequence[RunView], word: str, section: Callable[[RunView, str], Any]
) -> list[tuple[str, Any]]:
    """A section of each run that has one, by its label; ``word`` and a number is a name that no other part has."""
    found = ((shown.label, section(shown, f"{word}{index}")) for index, shown in enumerate(runs))
    return [(label, each) for label, each in found if each]


def _profile(shown: RunView, name: str) -> dict[str, Any] | None:
    """What ``det-ds profile`` has found; None where it was not profiled, or its file is torn or of another version."""
    try:
        profile = json.loads((shown.run.path / PROFILE_DIR / PROFILE_JSON).read_text(encoding="utf-8"))
        whole = profile["step_s"] or 1.0
        parts = [
            (printable(part), number(1000 * seconds, 3), percent(seconds / whole))
            for part, seconds in profile["seconds"].items()
            if seconds
        ]
        findings = [
            {
                **{key: printable(each[key]) for key in ("code", "seen", "fix")},
                "saves": f"{seconds_text(each['saves_s'])}, {percent(each['share'])} of a step",
            }
            for each in profile["findings"]
        ]
        picture = profile_picture(profile) if can_draw() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        step = read_step(RunDir(shown.run.path).pipeline_step) if can_draw() else None
    except ConfigError:  # there is none, or it cannot be read
        step = None
    title = "What each rank computes when"
    return {
        "parts": [*parts, ("step", number(1000 * profile["step_s"], 3), "")],
        "findings": findings,
        "by_rank": markup_of(picture, f"{name}-0", "The parts by rank"),
        "schedule": markup_of(None if step is None else step_picture(step), f"{name}-1", title),
    }


def _partition(shown: RunView, name: str) -> dict[str, str] | None:
    """How a pipeline's layers are shared out by their times; None where they are not."""
    try:
        found = read_partition(RunDir(shown.run.path).partition.read_text())
    except (OSError, ValueError):
        return None
    if found is None:
        return None
    picture = markup_of(partition_picture(found) if can_draw() else None, name)
    return {"words": printable(in_words(found)), "picture": picture}


def _block(shown: RunView, _: str) -> str:
    """What det-ds run prints at its end, of a run of this machine that has ended."""
    if shown.status == RUNNING or not shown.run.path.is_dir():
        return ""
    lines = closing_block(shown.run)
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines)
