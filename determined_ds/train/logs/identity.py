"""A run as the tools of a team show it: its name and key, and the configuration, with where values came from."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from determined_ds.config.loggers import LOGGING
from determined_ds.documents.files import write_whole
from determined_ds.rundir.launches import FORK, START, Launch
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.logs.messages import ShownRun
from determined_ds.train.tensorboard_files import OF_TOOLS, uploaded_to

UNCATEGORIZED = "Uncategorized"  # a master's project of experiments without one
TRIALS = "trials"  # the folder of a search with its trials
# Fields of a launch that have a place of their own.
APART = ("hyperparameters", "ds_config", "origins", "versions", "machine", "warnings", "time")


@dataclass(frozen=True, kw_only=True)
class RunHere:
    """A run off a cluster.

    Args:
        there: Its directory.
    """

    there: RunDir

    @property
    def name(self) -> str:
        """What distinguishes it from others of its experiment, for people."""
        return self.there.path.name

    @property
    def kept_in(self) -> str:
        """Where its files are found later."""
        return str(self.there.path)

    @property
    def group(self) -> str:
        """The search that it is a trial of; "" without one."""
        folder = self.there.path.parent
        return folder.parent.name if folder.name == TRIALS else ""

    def key(self, launch: Launch) -> tuple[str, bool]:
        """The key, and whether it is known to the tools from an earlier launch; a new run gets a new one."""
        if launch.kind not in (START, FORK):
            try:
                return str(json.loads(self.there.loggers.read_bytes())["key"]), True
            except (OSError, ValueError, KeyError):
                pass
        key = uuid.uuid4().hex
        write_whole(self.there.loggers, json.dumps({"key": key}) + "\n")
        return key, False

    @property
    def ids(self) -> dict[str, Any]:
        """Where it is found again."""
        return {"run_dir": str(self.there.path)}


@dataclass(frozen=True, kw_only=True)
class RunOnCluster:
    """A trial on a cluster.

    Args:
        info: Determined's information about it.
    """

    info: Any

    @property
    def name(self) -> str:
        """What distinguishes it from others of its experiment, for people."""
        return f"trial {self.info.trial.trial_id}"

    @property
    def kept_in(self) -> str:
        """Where its files are found once the container is gone."""
        return f"{uploaded_to(self.info)}/{OF_TOOLS}"

    @property
    def group(self) -> str:
        """Its experiment."""
        return f"experiment {self.info.trial.experiment_id}"

    def key(self, launch: Launch) -> tuple[str, bool]:
        """The key, which every start of the trial finds again, and whether there was one before."""
        trial = f"{self.info.cluster_id}/{self.info.trial.trial_id}"
        return hashlib.sha256(trial.encode()).hexdigest()[:32], launch.kind not in (START, FORK)

    @property
    def ids(self) -> dict[str, Any]:
        """Where it is found again."""
        return {
            "cluster_id": self.info.cluster_id,
            "experiment_id": self.info.trial.experiment_id,
            "trial_id": self.info.trial.trial_id,
            "master": self.info.master_url,
        }


def shown_run(
    launch: Launch,
    run: RunHere | RunOnCluster,
    exp_conf: Mapping[str, Any],
    tools: Mapping[str, Mapping[str, Any]],
    *,
    folder: Path,
) -> ShownRun:
    """Describe a run to the tools.

    Args:
        launch: What is trained; without secrets.
        run: Where.
        exp_conf: The experiment's configuration.
        tools: Those of the run, each with its options.
        folder: Where they may write.
    """
    key, is_known = run.key(launch)
    name, project = launch.name or "determined_ds", exp_conf.get("project")
    return ShownRun(
        key=key,
        name=f"{name} {run.name}",
        project=str(project if project and project != UNCATEGORIZED else name),
        group=f"{name} {run.group}" if run.group else "",
        tags=tuple(map(str, exp_conf.get("labels") or ())),
        notes=str(exp_conf.get("description") or ""),
        continues=launch.steps_completed if is_known else None,
        config=config_of(launch, run.ids),
        folder=str(folder),
        kept_in=run.kept_in,
        pid=os.getpid(),
        tools={name: dict(options) for name, options in tools.items()},
    )


def config_of(launch: Launch, ids: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run, as tools show it."""
    given = asdict(launch)
    hyperparameters = {name: value for name, value in launch.hyperparameters.items() if name != LOGGING}
    return {
        **{name: value for name, value in given.items() if name not in APART and value != ""},
        "hyperparameters": hyperparameters,
        "deepspeed": given["ds_config"],
        "origins": given["origins"],
        "versions": given["versions"],
        "machine": given["machine"],
        "determined": dict(ids),
    }
