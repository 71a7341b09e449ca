"""A run off-cluster, reported to a Determined master: the web UI shows it as an unmanaged experiment.

By ``determined.experimental.core_v2``, in a thread: training does not wait for answers, and a failure is one warning.
Its log shipper is not used: where the master does not answer, printing would wait for it.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from determined.common import util
from determined.experimental import core_v2
from determined.experimental.core_v2 import _core_v2

from determined_ds.cluster.trials import master_client
from determined_ds.documents.files import write_whole
from determined_ds.experiment.secrets import masked
from determined_ds.rundir.run_dir import RunDir

logger = logging.getLogger("determined_ds")

LAST_S = 30.0  # that the end of training waits for reports which the master has not taken yet
# Sections of an experiment's configuration that core_v2 takes; the rest only concerns clusters.
SHOWN = ("name", "description", "labels", "workspace", "project", "data")


class MasterReport:
    """Rank 0's reports of its run to a master while it trains, and of how it ends; a resumed run is one experiment."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], hparams: Mapping[str, Any]) -> None:
        self._run_dir = RunDir(run_dir)
        self._config = masked({**config, "hyperparameters": dict(hparams)})
        self._context: Any = None
        self._failed = False
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="master-report", daemon=True)
        self._thread.start()
        self._jobs.put(self._open)

    def send(self, part: str, method: str, *args: Any) -> None:
        """Call a method of a part of the core context, such as ``train`` and ``report_progress``."""
        self._jobs.put(lambda: getattr(getattr(self._context, part), method)(*args))

    def __enter__(self) -> MasterReport:
        return self

    def __exit__(self, *error: Any) -> None:
        """Report the end, and wait at most :data:`LAST_S` until all is reported."""
        self.send("_metrics", "close")
        self.send("_heartbeat", "close", *error)
        self._jobs.put(None)
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            self._warn(f"it has not taken all reports within {LAST_S:.0f} s")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._failed:
                    job()
            except Exception as error:
                self._warn(str(error) or type(error).__name__)

    def _warn(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("warning: the run continues, and is not reported to the master: %s", reason)

    def _open(self) -> None:
        client = master_client()
        client._session = client._session.with_retry(util.get_max_retries_config())
        searcher = self._config.get("searcher") or {}
        smaller = searcher.get("smaller_is_better") is not False
        try:  # the run's name for the master, the same when it resumes
            name = str(json.loads(self._run_dir.master.read_text())["external_id"])
        except (OSError, ValueError, KeyError):
            name = str(uuid.uuid4())
            write_whole(self._run_dir.master, json.dumps({"external_id": name}) + "\n")
        config = core_v2.Config(
            **{key: self._config.get(key) for key in SHOWN},
            hparams=self._config["hyperparameters"],
            searcher={"name": "single", "metric": searcher.get("metric"), "smaller_is_better": smaller},
            checkpoint_storage={"type": "directory", "container_path": str(self._run_dir.checkpoints)},
            external_experiment_id=name,
            external_trial_id=name,
        )
        mode = core_v2.TensorboardMode.MANUAL
        # A script finds the trial of its run as if on a cluster, which core_v2 would take for its own.
        with mock.patch.object(_core_v2, "determined", SimpleNamespace(get_cluster_info=lambda: None)):
            context: Any = core_v2.init_context(config=config, client=client, tensorboard_mode=mode)
        # Where it would put TensorBoard's files, among the checkpoints: _make_v2_context in determined 0.38.1.
        shutil.rmtree(self._run_dir.checkpoints / context.info.cluster_id, ignore_errors=True)
        # A failed report also shows that the master does not answer.
        logging.getLogger("determined.core").addFilter(lambda record: "heartbeat" not in record.getMessage())
        context._metrics.start()
        context._heartbeat.start()
        self._context = context
        print(f"reported to {client._master}/det/experiments/{context.info.trial.experiment_id}", flush=True)
