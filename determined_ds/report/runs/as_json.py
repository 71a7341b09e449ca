"""What a page of runs shows, as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from determined_ds.report.runs.final_figures import figure_columns
from determined_ds.report.runs.given_values import configuration, differences, environment, with_sections
from determined_ds.report.runs.run_view import RunView
from determined_ds.rundir.metrics_file import jsonable


def runs_as_json(runs: Sequence[RunView]) -> dict[str, Any]:
    """The runs, whole: no curve is thinned. Numbers that JSON lacks are ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    each = [
        {
            **with_sections(configuration(shown)),
            **{f"environment.{k}": v for k, v in environment(shown).items()},
        }
        for shown in runs
    ]
    found: dict[str, Any] = jsonable(
        {
            "runs": [_run(shown, runs) for shown in runs],
            "differs": {
                difference.key: dict(zip((shown.label for shown in runs), difference.values, strict=True))
                for difference in differences(each)
            },
        }
    )
    return found


def _run(shown: RunView, runs: Sequence[RunView]) -> dict[str, Any]:
    run = shown.run
    return {
        "label": shown.label,
        "path": shown.place,
        "name": run.name,
        "status": shown.status,
        "reason": shown.why,
        "steps_completed": shown.steps,
        "figures": {column.name: column.of(shown).value for column in figure_columns(runs)},
        "best": asdict(shown.best) if shown.best else None,
        "result": asdict(run.result) if run.result else None,
        "configuration": {
            section: {key: asdict(setting) for key, setting in settings.items()}
            for section, settings in configuration(shown).items()
        },
        "environment": {key: setting.value for key, setting in environment(shown).items()},
        "launches": [
            {"time": launch.time, "kind": launch.kind, "reason": launch.reason, "slots": launch.slots}
            | {"steps_completed": launch.steps_completed, "checkpoint": launch.checkpoint}
            for launch in run.launches
        ],
        "checkpoints": [
            {"uuid": each.uuid, "steps_completed": each.steps_completed} for each in run.checkpoints
        ],
        "warnings": [asdict(each) for each in shown.warnings],
        "curves": {
            name: {"steps": curve.steps, "seconds": curve.seconds, "values": curve.values}
            for name, curve in shown.curves.items()
        },
    }
