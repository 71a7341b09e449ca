"""Comet, by its client."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from determined_ds.runtime.logs.flattening import flattened
from determined_ds.runtime.logs.messages import NumbersAt, ShownRun

# Whatever the client would find out by itself: of this process, which trains nothing.
OF_THE_PROCESS = (
    *("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "auto_param_logging"),
    *("auto_metric_logging", "auto_output_logging", "auto_log_co2", "auto_histogram_tensorboard_logging"),
)


class CometExperiment:
    """An experiment there, with the key as its own.

    Comet keeps what a run logged after the batch that it continues from, beside what is logged again at the same
    steps; ``continued from batch`` among the others says where. Offline, each start of a run is an archive, and
    uploading them in turn continues one experiment.

    Args:
        about: The run.
        options: ``project_name``, ``workspace``, ``name``, ``tags``, ``online``, ``offline_directory``.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._about = about
        self._options = options
        self._experiment: Any = None

    def begin(self) -> str:
        """Open the experiment."""
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # of what this process imports
        import comet_ml

        logging.getLogger("comet_ml").setLevel(logging.WARNING)
        folder = self._folder()
        off: dict[str, Any] = dict.fromkeys(OF_THE_PROCESS, False)
        made = comet_ml.ExperimentConfig(
            **off,
            display_summary_level=0,
            offline_directory=folder,
            name=self._options.get("name") or self._about.name,
            tags=[*self._about.tags, *self._options.get("tags", ())],
        )
        project = self._options.get("project_name")
        self._experiment = comet_ml.start(
            project=project or (None if "COMET_PROJECT_NAME" in os.environ else self._about.project),
            workspace=self._options.get("workspace"),
            online=self._options.get("online"),
            experiment_key=self._about.key,
            mode="get_or_create",
            experiment_config=made,
        )
        self._experiment.log_parameters(flattened(self._about.config))
        if self._about.group:
            self._experiment.log_other("group", self._about.group)
        if self._about.notes:
            self._experiment.log_other("notes", self._about.notes)
        if self._about.continues is not None:
            self._experiment.log_other("continued from batch", self._about.continues)
        if isinstance(self._experiment, comet_ml.OfflineExperiment):
            return f"offline; later: comet upload {self._about.later(folder)}/{self._about.key}*.zip"
        return str(self._experiment.url or "")

    def _folder(self) -> str:
        stated = self._options.get("offline_directory") or os.environ.get("COMET_OFFLINE_DIRECTORY")
        return str(stated or os.path.join(self._about.folder, "comet"))

    def report(self, reports: list[NumbersAt]) -> None:
        """Log metrics."""
        for report in reports:
            self._experiment.log_metrics(report.metrics, step=report.step)

    def end(self, status: str) -> None:
        """Close the experiment."""
        self._experiment.log_other("status", status)
        self._experiment.end()
