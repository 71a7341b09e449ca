"""A run as its directory records it: read once, whole, while it trains or afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import Checkpoint, checkpoints_in
from determined_ds.documents.files import read_yaml
from determined_ds.errors import ConfigError, DeterminedDSError
from determined_ds.rundir.conclusion import RunResult, command_here, read_result
from determined_ds.rundir.launches import Launch, read_launches
from determined_ds.rundir.metrics_file import Record, read_records
from determined_ds.rundir.run_dir import RunDir, run_dir_problem
from determined_ds.rundir.run_lock import is_held


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run has left so far.

    Args:
        path: The run directory.
        config: Of the experiment, as it was run; empty where the file cannot be read.
        ds_config: What DeepSpeed was given; empty where no engine was made.
        launches: Each start of its ranks, the first one first; none of a run of an earlier version.
        records: The lines of ``metrics.jsonl``: ``group``, ``steps_completed``, ``metrics``, and mostly ``time``.
        checkpoints: Those that it keeps, the newest first.
        result: How it ended; None of one that has not, or was killed.
        memory: What the memory model expects of the engines of its last launch, in bytes of the rank with most:
            ``total_bytes``, ``model_states_bytes``, ``host_bytes``, and ``has_activations``; empty where not known.
        damaged: Of each file of JSON that is there and cannot be read: its name, and what is wrong with it.
        is_running: Whether a process of this machine, or of one that shares its locks, trains it now.
    """

    path: Path
    config: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    launches: tuple[Launch, ...]
    records: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...]
    result: RunResult | None
    is_running: bool
    memory: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the experiment; that of the folder, where it is not recorded."""
        return str(self.config.get("name") or self.path.name)

    @property
    def resume(self) -> str | None:
        """The command that resumes it; of a run that was killed and wrote no result.json, as its launch recorded it."""
        if self.result is not None:
            return self.result.resume
        if self.is_running or not self.checkpoints or not self.launches:
            return None
        return command_here(self.launches[-1].resume, RunDir(self.path)) or None

    def of_group(self, group: str) -> list[Record]:
        """The records of a group, e.g. ``training``."""
        return [record for record in self.records if record["group"] == group]


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    there = RunDir(path)
    return there.experiment.is_file() and any(
        each.exists() for each in (there.metrics, there.result, there.lock)
    )


def read_run(path: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is not one.
    """
    if not is_run(path):
        message = "is not a run directory" if path.exists() else "does not exist"
        raise ConfigError(
            run_dir_problem(path, message, "name a folder that det-ds run has made, e.g. one of runs/*/*")
        )
    there, damaged = RunDir(path), []

    def content(file: Path) -> dict[str, Any]:
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            damaged.append(f"{file.name} cannot be read: {error}; remove it")
            return {}
        if not isinstance(found, dict):
            damaged.append(f"{file.name} is not a JSON object; remove it")
            return {}
        return found

    return RecordedRun(
        path=path,
        config=_config(there.experiment),
        ds_config=content(there.deepspeed_config),
        launches=read_launches(there.launches),
        records=tuple(read_records(there.metrics)),
        checkpoints=tuple(checkpoints_in(there.checkpoints)),
        result=read_result(there),
        is_running=is_held(path),
        memory=content(there.memory),
        damaged=tuple(damaged),
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(read_yaml(path).data)
    except (DeterminedDSError, OSError):
        return {}
