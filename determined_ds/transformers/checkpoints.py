"""Checkpoints of transformers in Determined's storage: the Trainer writes ``checkpoint-N``, which is uploaded whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import core

from determined_ds.checkpoints.retention import over_limit
from determined_ds.errors import CheckpointError

PREFIX = "checkpoint-"
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
        *,
        trial_id: int | None,
        user_data: dict[str, Any] | None,
    ) -> None:
        self._core = core_context
        self._distributed = core_context.distributed
        self._folder = Path(output_dir)
        self._trial_id = trial_id
        self._user_data = user_data
        self._kept: list[dict[str, Any]] = []  # uuid and steps_completed, the oldest first

    def fetch(self, uuid: str) -> Path:
        """Bring a checkpoint into the Trainer's folder, as ``checkpoint-N``; a collective.

        What is there of later steps was written by a run that ended before it was stored, and is removed.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it holds no ``checkpoint-N``.
        """
        machine, is_local_chief = self._distributed.cross_rank, self._distributed.local_rank == 0
        fetched = self._folder / f".{uuid}-{machine}"
        self._core.checkpoint.download(uuid, str(fetched))
        self._distributed.allgather(None)
        steps = max((_steps_of(each.name) for each in fetched.glob(f"{PREFIX}*")), default=-1)
        # All ranks have looked before the first one moves it.
        if min(self._distributed.allgather(steps)) < 0:
            message = f"checkpoint {uuid} holds no {PREFIX}N: it was not written by transformers' Trainer"
            raise CheckpointError(message)
        name = f"{PREFIX}{steps}"
        target = self._folder / name
        if self._distributed.rank == 0:
            self._remove_later(steps)
            os.replace(fetched / name, target)
        self._distributed.allgather(None)
        if is_local_chief and not target.exists():  # a folder that machines do not share
            os.replace(fetched / name, target)
        self._distributed.allgather(None)
        if is_local_chief:
            shutil.rmtree(fetched, ignore_errors=True)
        self._remember(target, uuid)
        _allow_generators()
        return target

    def _remove_later(self, steps: int) -> None:
        for there in self._folder.glob(f"{PREFIX}*"):
            if _steps_of(there.name) >= steps:
                shutil.rmtree(there)

    def _remember(self, folder: Path, uuid: str) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._kept = json.loads((folder / KEPT).read_bytes())["checkpoints"]
        self._kept.append({"uuid": uuid, "steps_completed": _steps_of(folder.name)})

    def store(self, steps: int) -> str:
        """Store ``checkpoint-N``, which all ranks have written; a collective. Returns its uuid."""
        folder = self._folder / f"{PREFIX}{steps}"
        if self._distributed.rank == 0:
            if self._user_data is not None:
                (folder / USER_DATA).write_text(json.dumps(self._user_data))
            (folder / KEPT).write_text(json.dumps({"checkpoints": self._kept}))
        self._distributed.allgather(None)
        metadata: dict[str, Any] = {"steps_completed": steps}
        if self._trial_id is not None:
            metadata["trial_id"] = self._trial_id
        uuid = self._core.checkpoint.upload(
            str(self._folder), metadata=metadata, shard=True, selector=_in(folder.name)
        )
        self._kept.append({"uuid": uuid, "steps_completed": steps})
        return uuid

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


def _allow_generators() -> None:
    """Let torch load the state of numpy's generator, which transformers 4.40 does not declare to be plain data.

    Source: ``Trainer._load_rng_state`` of 4.40; torch 2.6 and later refuse it otherwise.
    """
    state: Any = np.random.get_state(legacy=True)
    numbers = state[1]
    plain = [numbers.__reduce__()[0], np.ndarray, np.dtype, type(numbers.dtype)]
    torch.serialization.add_safe_globals(plain)


def _in(folder: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(f"{folder}/")


def _steps_of(name: str) -> int:
    """N of ``checkpoint-N``; -1 for any other name."""
    number = name.removeprefix(PREFIX)
    return int(number) if number.isdigit() else -1
