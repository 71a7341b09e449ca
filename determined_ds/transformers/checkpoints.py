"""Checkpoints of transformers in Determined's storage: the Trainer writes ``checkpoint-N``, which is uploaded whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined import core

from determined_ds.checkpoints.files import over_limit
from determined_ds.errors import CheckpointError
from determined_ds.train.group.process_group import as_chief

PREFIX = "checkpoint-"
STATE = "trainer_state.json"
USER_DATA = "my_data.json"  # as Determined's callback names it
KEPT = "determined_ds.json"  # in a checkpoint: the trial's checkpoints before it


class TrainerCheckpoints:
    """The checkpoints of one trial.

    Args:
        core_context: Where they are stored.
        output_dir: The folder of the Trainer.
        trial_id: For their metadata; None outside of a trial.
        user_data: Written into each of them.
    """

    def __init__(
        self,
        core_context: core.Context,
        output_dir: str,
        trial_id: int | None,
        user_data: dict[str, Any] | None,
    ) -> None:
        self._core, self._distributed = core_context, core_context.distributed
        self._folder, self._trial_id, self._user_data = Path(output_dir), trial_id, user_data
        self._kept: list[dict[str, Any]] = []  # uuid and steps_completed, the oldest first

    def fetch(self, uuid: str) -> Path:
        """Bring a checkpoint into the Trainer's folder, as ``checkpoint-N``; a collective.

        What is there of N and of later steps was written by a run that ended before it was stored, and is removed.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it holds no ``checkpoint-N``.
        """

        def make_room() -> int:
            steps = int(self._core.checkpoint.get_metadata(uuid).get("steps_completed", -1))
            for there in self._folder.glob(f"{PREFIX}*"):
                number = there.name.removeprefix(PREFIX)
                if number.isdigit() and int(number) >= steps:
                    shutil.rmtree(there)
            return steps

        steps = as_chief(self._distributed, make_room)
        folder = self._folder / f"{PREFIX}{steps}"
        self._core.checkpoint.download(uuid, str(self._folder))
        self._distributed.allgather(None)  # machines may share the folder
        if not (folder / STATE).is_file():
            message = f"checkpoint {uuid} holds no {folder.name}: it was not written by transformers' Trainer"
            raise CheckpointError(message)
        with contextlib.suppress(OSError, ValueError, KeyError):  # of Determined's callback there is none
            self._kept = json.loads((folder / KEPT).read_bytes())["checkpoints"]
        self._kept.append({"uuid": uuid, "steps_completed": steps})
        return folder

    def store(self, steps: int) -> None:
        """Store ``checkpoint-N``, which all ranks have written; a collective."""
        folder = self._folder / f"{PREFIX}{steps}"
        if self._distributed.rank == 0:
            if self._user_data is not None:
                (folder / USER_DATA).write_text(json.dumps(self._user_data))
            (folder / KEPT).write_text(json.dumps({"checkpoints": self._kept}))
        self._distributed.allgather(None)
        of_trial = {} if self._trial_id is None else {"trial_id": self._trial_id}
        metadata, selector = (
            {"steps_completed": steps, **of_trial},
            lambda name: name.startswith(f"{folder.name}/"),
        )
        uuid = self._core.checkpoint.upload(
            str(self._folder), metadata=metadata, shard=True, selector=selector
        )
        self._kept.append({"uuid": uuid, "steps_completed": steps})

    @contextlib.contextmanager
    def newest(self) -> Iterator[Path]:
        """The newest checkpoint as it is stored: its ``checkpoint-N``; a collective."""
        newest = self._kept[-1]
        with self._core.checkpoint.restore_path(newest["uuid"]) as path:
            yield Path(path) / f"{PREFIX}{newest['steps_completed']}"

    def prune(self, limit: int | None, best_steps: int | None) -> None:
        """Delete the oldest checkpoints over the limit, never the best nor the newest.

        Args:
            limit: Checkpoints to keep; None: all.
            best_steps: Steps of the best one.
        """
        best = next((each for each in self._kept if each["steps_completed"] == best_steps), None)
        for each in over_limit(self._kept, limit, best):
            self._kept.remove(each)
            if self._distributed.rank == 0:
                self._core.checkpoint.delete(each["uuid"])
