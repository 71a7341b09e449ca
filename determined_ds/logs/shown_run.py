"""A run as tools show it: its key, its name, its configuration, and its metrics by their whole names."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from determined_ds.config.params import LOGGING
from determined_ds.documents.files import write_whole
from determined_ds.logs.tensorboard import OF_TOOLS, uploaded_to
from determined_ds.rundir.records import FORK, START, Launch
from determined_ds.rundir.run_dir import RunDir

COMPLETED, STOPPED, FAILED = "completed", "stopped", "failed"
UNCATEGORIZED = "Uncategorized"  # a master's project of experiments without one
TRIALS = "trials"  # the folder of a search with its trials
# Fields of a launch that have a place of their own.
APART = ("hyperparameters", "ds_config", "origins", "versions", "machine", "warnings", "time")


@dataclass(frozen=True)
class NumbersAt:
    """Metrics of one moment.

    Args:
        step: Batches trained.
        time: Seconds since the epoch.
        metrics: Whole name -> number, which may be NaN or infinite.
    """

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """The run that tools show.

    Args:
        key: 32 hexadecimal digits that stay the same when the run is resumed or restarted.
        name: What people call it.
        project: Where a tool puts it that is given no project.
        group: What it belongs to, e.g. a search; "" for nothing.
        tags: Of the experiment.
        notes: Of the experiment.
        continues: The batch that it continues from, where its tools have seen it before; None where it is new.
        config: The configuration, with where values came from, and the surroundings.
        folder: Where tools may write.
        kept_in: Where people find what is written there: on a cluster, where it is uploaded to.
    """

    key: str
    name: str
    project: str
    group: str
    tags: tuple[str, ...]
    notes: str
    continues: int | None
    config: Mapping[str, Any]
    folder: Path
    kept_in: str


def shown_run(launch: Launch, exp_conf: Mapping[str, Any], folder: Path, info: Any = None) -> ShownRun:
    """Describe a run to the tools; off a cluster, its key is kept in the run directory.

    Args:
        launch: What is trained; without secrets.
        exp_conf: The experiment's configuration.
        folder: Where tools may write; off a cluster, the run directory.
        info: Determined's information about the trial, on a cluster.
    """
    is_known = launch.kind not in (START, FORK)
    if info is not None:
        trial = f"{info.cluster_id}/{info.trial.trial_id}"
        key = hashlib.sha256(trial.encode()).hexdigest()[:32]  # every start of the trial finds it again
        own_name, group = f"trial {info.trial.trial_id}", f"experiment {info.trial.experiment_id}"
        kept_in = f"{uploaded_to(info)}/{OF_TOOLS}"
        ids = {
            "cluster_id": info.cluster_id,
            "experiment_id": info.trial.experiment_id,
            "trial_id": info.trial.trial_id,
            "master": info.master_url,
        }
    else:
        key, file = "", RunDir(folder).loggers
        try:
            key = str(json.loads(file.read_bytes())["key"]) if is_known else ""
        except (OSError, ValueError, KeyError):
            is_known = False
        if not key:
            key = uuid.uuid4().hex
            write_whole(file, json.dumps({"key": key}) + "\n")
        own_name, kept_in, ids = folder.name, str(folder), {"run_dir": str(folder)}
        group = folder.parent.parent.name if folder.parent.name == TRIALS else ""
    name, project = launch.name or "determined_ds", exp_conf.get("project")
    given = asdict(launch)
    config = {
        **{field: value for field, value in given.items() if field not in APART and value != ""},
        "hyperparameters": {each: value for each, value in launch.hyperparameters.items() if each != LOGGING},
        "deepspeed": given["ds_config"],
        "origins": given["origins"],
        "versions": given["versions"],
        "machine": given["machine"],
        "determined": ids,
    }
    return ShownRun(
        key=key,
        name=f"{name} {own_name}",
        project=str(project if project and project != UNCATEGORIZED else name),
        group=f"{name} {group}" if group else "",
        tags=tuple(map(str, exp_conf.get("labels") or ())),
        notes=str(exp_conf.get("description") or ""),
        continues=launch.steps_completed if is_known else None,
        config=config,
        folder=folder,
        kept_in=kept_in,
    )


def named(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Metrics by the names that they have in every tool, e.g. ``validation/accuracy/top5``.

    Args:
        name: Of the group.
        value: As it is reported: nested mappings and lists, of numbers, tensors or arrays; others are left out.
    """
    if hasattr(value, "tolist"):  # of torch or numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named(f"{name}/{index}", item)
    elif isinstance(value, (bool, int, float)):
        yield name, int(value) if isinstance(value, bool) else value


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a mapping by dotted names, e.g. ``deepspeed.zero_optimization.stage``; an empty one stays."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
