"""Weights & Biases, by its client."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from determined_ds.train.logs.messages import FAILED, STOPPED, NumbersAt, ShownRun

STEP = "batches"
# Options -> the client's environment variables, which stand where an option is not stated.
VARIABLES = {
    "project": "WANDB_PROJECT",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "dir": "WANDB_DIR",
}


class WandbRun:
    """A run there, with the key as its id.

    A resumed run goes back to the batch that it continues from. Where the server cannot do that, and offline, what was
    logged after that batch stays beside what is logged again; ``batches``, the axis of every chart, shows where.

    Args:
        about: The run.
        options: Of ``wandb.init``.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        own = {
            "project": about.project,
            "name": about.name,
            "group": about.group or None,
            "tags": list(about.tags) or None,
            "notes": about.notes or None,
            "dir": about.folder,
        }
        defaults = {key: value for key, value in own.items() if VARIABLES[key] not in os.environ}
        self._options = {**defaults, **options}
        if options.get("tags"):
            self._options["tags"] = [*about.tags, *options["tags"]]
        self._about = about
        self._run: Any = None

    def begin(self) -> str:
        """Open the run."""
        import wandb

        os.makedirs(self._options.get("dir") or ".", exist_ok=True)
        settings = wandb.Settings(console="off", silent=True, x_stats_pid=self._about.pid)
        arguments = {
            **self._options,
            "config": dict(self._about.config),
            "reinit": "create_new",
            "settings": settings,
        }
        self._run = self._rewound(arguments) or wandb.init(id=self._about.key, resume="allow", **arguments)
        # Lists of tags are not merged by a resume; a changed configuration replaces the earlier one.
        self._run.config.update(dict(self._about.config), allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._is_offline:
            folder = self._about.later(os.path.dirname(os.path.dirname(self._run.dir)))
            starts = f"{folder}/offline-run-*-{self._about.key}"  # each in a folder of its own
            return "" if self._mode == "disabled" else f"offline; later: wandb sync {starts}"
        return str(self._run.url or "")

    @property
    def _mode(self) -> str:
        return str(self._options.get("mode") or os.environ.get("WANDB_MODE") or "online")

    @property
    def _is_offline(self) -> bool:
        return self._mode in ("offline", "dryrun", "disabled")

    def _rewound(self, arguments: dict[str, Any]) -> Any:
        """The run, as it was at the batch that it continues from; None where that cannot be."""
        import wandb

        if self._about.continues is None or self._is_offline:
            return None
        at = f"{self._about.key}?_step={self._about.continues}"
        with contextlib.suppress(wandb.Error):  # a server without rewinding; a run that it does not know
            return wandb.init(resume_from=at, **arguments)
        return None

    def report(self, reports: list[NumbersAt]) -> None:
        """Log rows; the step is that of batches, unless the run has been further before."""
        for report in reports:
            row = {**report.metrics, STEP: report.step, "_timestamp": report.time}
            step = {"step": report.step} if report.step >= self._run.step else {}
            self._run.log(row, **step)

    def end(self, status: str) -> None:
        """Close the run."""
        self._run.summary["status"] = status
        if status == STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if status == FAILED else 0)
