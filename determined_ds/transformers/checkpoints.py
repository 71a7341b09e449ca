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

STATE = "trainer_state.json"
USER_DATA = "my_data.json"  # as Determined's callback names it
KEPT = "determined_ds.json"  # in a checkpoint: the trial's checkpoints before it


class TrainerCheckpoints:
    """The checkpoints of one trial in the Trainer's folder and in storage; each method is a collective."""

    def __init__(
        self, core_context: core.Context, output_dir: Path, metadata: dict[str, Any], user_data: Any
    ) -> None:
        self._core, self._distributed = core_context, core_context.distributed
        self._folder, self._metadata, self._user_data = output_dir, metadata, user_data
        self._kept: list[dict[str, Any]] = []  # uuid and steps_completed, the oldest first

    def fetch(self, uuid: str) -> Path:
        """Bring a checkpoint into the Trainer's folder. Returns its folder there, ``checkpoint-N``.

        What is there of N and of later steps was written by a run that ended before it was stored, and is removed.
        """

        def make_room() -> int:
            steps = int(self._core.checkpoint.get_metadata(uuid).get("steps_completed", -1))
            for there in self._folder.glob("checkpoint-*"):
                number = there.name.removeprefix("checkpoint-")
                if number.isdigit() and int(number) >= steps:
                    shutil.rmtree(there)
            return steps

        steps = as_chief(self._distributed, make_room)
        folder = self._folder / f"checkpoint-{steps}"
        self._core.checkpoint.download(uuid, str(self._folder))
        self._distributed.allgather(None)  # machines may share the folder
        if not (folder / STATE).is_file():
            message = f"checkpoint {uuid} holds no {folder.name}: it was not written by transformers' Trainer"
            raise CheckpointError(message)
        with contextlib.suppress(OSError, ValueError, KeyError):  # of Determined's callback there is none
            self._kept = json.loads((folder / KEPT).read_bytes())["checkpoints"]
        self._kept.append({"uuid": uuid, "steps_completed": steps})
        return folder

    def store(self, steps: int, limit: int | None, best_steps: int | None) -> None:
        """Store ``checkpoint-N``, and delete the oldest ones over the limit, never the best nor the newest."""
        folder = self._folder / f"checkpoint-{steps}"
        if self._distributed.rank == 0:
            if self._user_data is not None:
                (folder / USER_DATA).write_text(json.dumps(self._user_data))
            (folder / KEPT).write_text(json.dumps({"checkpoints": self._kept}))
        self._distributed.allgather(None)
        found = {"steps_completed": steps, **self._metadata}
        uuid = self._core.checkpoint.upload(
            str(self._folder),
            metadata=found,
            shard=True,
            selector=lambda name: name.startswith(f"{folder.name}/"),
        )
        self._kept.append({"uuid": uuid, "steps_completed": steps})
        best = next((each for each in self._kept if each["steps_completed"] == best_steps), None)
        for each in over_limit(self._kept, limit, best):
            self._kept.remove(each)
            if self._distributed.rank == 0:
                self._core.checkpoint.delete(each["uuid"])

    @contextlib.contextmanager
    def newest(self) -> Iterator[Path]:
        """The ``checkpoint-N`` of the newest one, as it is stored."""
        newest = self._kept[-1]
        with self._core.checkpoint.restore_path(newest["uuid"]) as path:
            yield Path(path) / f"checkpoint-{newest['steps_completed']}"
