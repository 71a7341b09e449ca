"""The end of an experiment here: what a master does with its checkpoints then.

A run that is stopped or has failed may be resumed, and has not come to its end: as with a paused experiment, nothing is
deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.config.params import STORAGE, stated_policy
from determined_ds.experiment.experiment import Experiment
from determined_ds.protocol.checkpoint_files import PARTIAL, Checkpoint, is_index
from determined_ds.protocol.handed_on import count
from determined_ds.protocol.kept_checkpoints import rated_in, spare
from determined_ds.protocol.run_dir import RunDir

MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """A checkpoint that was deleted.

    Args:
        uuid: Its name.
        steps_completed: Batches trained when it was written.
        epochs_trained: Whole epochs among them.
        trial: Its trial's number in a search; 1 in a run.
    """

    uuid: str
    steps_completed: int
    epochs_trained: int = 0
    trial: int = 1


def delete_spare(experiment: Experiment, runs: Mapping[int, RunDir]) -> list[Deleted]:
    """Delete the checkpoints that ``checkpoint_storage.save_*`` does not keep, where the experiment states them.

    Args:
        experiment: With the secrets of its storage, where checkpoints are there.
        runs: Number of a trial -> its run directory.
    """
    policy = stated_policy(experiment.document)
    if policy is None:
        return []
    rated = [each for number, run in runs.items() for each in rated_in(run, number, metric=experiment.metric)]
    storage = _Storage(experiment.config.get(STORAGE) or {})
    deleted = []
    for each in spare(rated, policy, smaller_is_better=experiment.smaller_is_better):
        found = each.checkpoint
        epochs = _epochs_of(found)
        if storage.delete(found):
            steps = found.steps_completed
            deleted.append(
                Deleted(uuid=found.uuid, steps_completed=steps, epochs_trained=epochs, trial=each.trial)
            )
    return deleted


def lines_of(deleted: Sequence[Deleted], experiment: Experiment) -> list[str]:
    """What was deleted, for people; no line where nothing was."""
    if not deleted:
        return []
    some, policy = count(len(deleted), "checkpoint"), stated_policy(experiment.document)
    by_trial = Counter(each.trial for each in sorted(deleted, key=lambda each: each.trial))
    if len(by_trial) > 1:
        of = [f"{number} of trial {trial}" for trial, number in by_trial.items()]
    else:
        of = [f"batch {steps}" for steps in sorted(each.steps_completed for each in deleted)]
    more = [f"and {len(of) - MOST_SHOWN} more"] if len(of) > MOST_SHOWN else []
    return [
        f"deleted     {some} that {STORAGE} does not keep ({policy}): {', '.join([*of[:MOST_SHOWN], *more])}"
    ]


def _epochs_of(checkpoint: Checkpoint) -> int:
    try:
        return int(json.loads((checkpoint.path / "trial_state.json").read_bytes())["epochs_trained"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class _Storage:
    """Deletes checkpoints, here and in ``checkpoint_storage``; one that it cannot delete is a warning."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._manager: Any = None

    def delete(self, checkpoint: Checkpoint) -> bool:
        """Delete one. Returns whether it is gone."""
        try:
            if is_index(checkpoint.path):  # the index last: without it nothing would name the rest
                self._delete_elsewhere(checkpoint.uuid)
            aside = checkpoint.path.with_name(f".{checkpoint.uuid}{PARTIAL}")
            os.rename(checkpoint.path, aside)  # whole or gone, should this process be killed
            shutil.rmtree(aside)
            return True
        except Exception as error:  # whatever the client of a storage raises
            kind = type(error).__name__
            print(f"warning: checkpoint {checkpoint.uuid} was not deleted: {kind}: {error}", file=sys.stderr)
            return False

    def _delete_elsewhere(self, uuid: str) -> None:
        if self._manager is None:
            from determined.common import storage

            self._manager = storage.build(self._config, container_path=None)
        self._manager.delete(uuid, ["**/*"])
