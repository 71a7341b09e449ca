"""How checkpoints are read back; :mod:`~determined_ds.runtime.checkpoints.checkpoint_writer` writes them.

The layout is Determined's, with a manifest:

    <uuid>/metadata.json                 steps_completed ...; Determined's
           manifest.json                 size and checksum of every file
           load_data.json                experiment config and hyperparameters
           trial_state.json              where training stands
           code/...                      on a cluster: the context directory
           det_state_dict_rank<R>.pth    generators, callbacks, reducers, unreported metrics, position in a stream
           model<I>/...                  each engine, see :mod:`~determined_ds.runtime.checkpoints.all_engines`

Reading one back executes nothing, see :mod:`~determined_ds.runtime.checkpoints.contents`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from determined.errors import CheckpointNotFound

from determined_ds.errors import CheckpointError
from determined_ds.protocol.checkpoint_files import (
    MANIFEST,
    damage_in_share,
    is_sealed,
    unverified,
)
from determined_ds.runtime.checkpoints import contents
from determined_ds.runtime.checkpoints.all_engines import overrides
from determined_ds.runtime.checkpoints.built import Record, put_into_effect, settings_kept
from determined_ds.runtime.checkpoints.checkpoint_writer import CheckpointWriter
from determined_ds.runtime.checkpoints.folders import is_shared, share_of
from determined_ds.runtime.checkpoints.parts import check_fits
from determined_ds.runtime.checkpoints.redistributed import load_into
from determined_ds.runtime.checkpoints.trial_state import TrialState, read_state
from determined_ds.trial.author import method_of

logger = logging.getLogger("determined_ds")

# What is loaded by each warm start, in words.
TAKEN = {
    "weights": "its weights alone, with a new optimizer and schedule",
    "all": "its weights, optimizer, schedule and loss scale",
}


class Checkpoints(CheckpointWriter):
    """Saves and loads the checkpoints of a run.

    Args:
        trial: Its ``save`` and ``load`` write and read the engines.
        context: Its core context stores the files, here or on the cluster.
        args: As for :class:`~determined_ds.runtime.checkpoints.checkpoint_writer.CheckpointWriter`.
        warm_start: ``weights`` or ``all``: what is loaded from another trial's checkpoint.
        options: As for the same.
    """

    def __init__(
        self, trial: Any, context: Any, *args: Any, warm_start: str = "weights", **options: Any
    ) -> None:
        super().__init__(trial, context, *args, **options)
        self._warm_start = warm_start
        self._engines.reset_optimizer = context.resets_optimizer

    def _count_damaged(self, state: TrialState, uuid: str) -> None:
        """Count what is in the run directory: damaged checkpoints too, as its oldest, which are pruned first."""
        if self._total_limit is None or not self._is_local:
            return
        if uuid not in state.kept:
            state.kept.append(uuid)
        counted = self._storage.counted(state.kept) if self._distributed.rank == 0 else None
        state.kept = self._distributed.broadcast(counted)

    # -------------------------------------------------------------------------------------------- load

    def load(self, uuid: str, *, trial_id: int) -> tuple[TrialState, dict[str, Any]]:
        """Read a checkpoint back; a collective.

        Args:
            uuid: Of the checkpoint; or the path of a folder.
            trial_id: This trial; on a cluster a checkpoint of another one is a warm start, and training counts from 0.

        Returns:
            Where training stands, and the state of the generators, to be set just before the next batch, when nothing
            is left to build.

        Raises:
            CheckpointError: it is missing or damaged, lacks this rank's part, or DeepSpeed refuses it.
        """
        try:
            with self._context._core.checkpoint.restore_path(uuid) as path:
                state, generators = self._load(Path(path), uuid, trial_id)
        except CheckpointNotFound as error:
            raise CheckpointError(f"checkpoint {uuid} is not in checkpoint_storage: {error}") from error
        if Path(uuid).is_absolute():  # another run's: those beside it are not this run's to delete
            state.kept, state.best = [], ""
        else:
            self._count_damaged(state, uuid)
        return state, generators

    def take(self, path: Path) -> tuple[TrialState, list[dict[str, Any]]]:
        """Load the weights alone, whichever ranks wrote them; a collective.

        Args:
            path: The checkpoint's folder.

        Returns:
            Where training stood, and the state of the callbacks on each rank that wrote it.
        """
        self._verify(path, path.name)
        with contents.only_data():
            state = read_state(path, path.name)
            self._read_weights(path, path.name)
            files = sorted(path.glob("det_state_dict_rank*.pth")) if self._callbacks else []
            parts = [torch.load(file, map_location="cpu", mmap=True) for file in files]
        return state, [part.get("callbacks", {}) for part in parts]

    def fork(self, path: Path) -> None:
        """Start from the folder of a checkpoint of another run, see :meth:`load`; training counts from 0."""
        self._load(path, path.name, None)

    def _load(self, path: Path, uuid: str, trial_id: int | None) -> tuple[TrialState, dict[str, Any]]:
        self._verify(path, uuid)
        with contents.only_data():
            return self._read(path, uuid, trial_id)

    def _verify(self, path: Path, uuid: str) -> None:
        shared = is_shared(path / MANIFEST, self._distributed)
        index, count = share_of(self._distributed, shared=shared)
        damages = self._distributed.allgather(damage_in_share(path, index, count))
        if found := [damage for damage in damages if damage]:
            fix = "resume from another checkpoint, or copy its files again"
            raise CheckpointError(f"checkpoint {uuid} is damaged: {found[0]}\n  fix: {fix}")
        if self._distributed.rank == 0 and not is_sealed(path):
            logger.warning("warning: %s", unverified(uuid))

    def _read(self, path: Path, uuid: str, trial_id: int | None) -> tuple[TrialState, dict[str, Any]]:
        state = read_state(path, uuid)
        if state.trial_id == trial_id or (self._is_local and trial_id is not None):
            checkpoint = self._read_all(path, uuid, state.batches_trained)
            for owners, states in ((self._callbacks, "callbacks"), (self._parts, "parts")):
                for name, owned in checkpoint.get(states, {}).items():
                    if name in owners:
                        load_into(owners[name], owned)
            return state, checkpoint.get("rng_state", {})
        if self._warm_start == "all":
            self._read_all(path, uuid, state.batches_trained)
        else:
            self._read_weights(path, uuid)
        taken = TAKEN[self._warm_start]
        if self._trial_loads:
            taken = f"what {method_of(self._trial, 'load')} takes"
        whose = f"trial {state.trial_id}" if state.trial_id else "/".join(path.parent.parent.parts[-2:])
        from_where = f"batch {state.batches_trained} of {whose}, checkpoint {uuid}"
        self._note(f"warm start  {from_where}: {taken}; counting from batch 0")
        return TrialState(trial_id=trial_id or 0), {}

    def _read_weights(self, path: Path, uuid: str) -> None:
        """Load the weights alone, whichever ranks wrote them; callbacks get the part of this rank, or of rank 0."""
        parts = [path / f"det_state_dict_rank{rank}.pth" for rank in (self._distributed.rank, 0)]
        part = next((part for part in parts if part.is_file()), None)
        checkpoint = torch.load(part, map_location="cpu") if part is not None else {}
        self._call_back("on_checkpoint_load_start", checkpoint)
        with contents.explained(uuid, own_method=self._trial_loads):
            if self._trial_loads:
                self._trial.load(self._context, path)
            else:
                self._engines.read_weights(path, uuid)

    def _read_all(self, path: Path, uuid: str, batch: int) -> dict[str, Any]:
        """Load the engines as they were, and return the rest of this rank's part."""
        checkpoint, elastic = self._own_parts.read(path, uuid, batch=batch)
        if elastic:
            self._note(elastic)
        built: list[Record] | None = checkpoint.get("built")
        is_indexed = self._engines.are_indexed(path)
        if not (is_indexed or self._trial_loads):
            check_fits(built, self._built, uuid, self._distributed, by_others=bool(elastic))
        self._call_back("on_checkpoint_load_start", checkpoint)
        with contents.explained(uuid, own_method=self._trial_loads):
            if self._trial_loads:
                self._trial.load(self._context, path)
            else:
                self._engines.load(path)
                built = self._engines.then or built
        if built is not None:
            for line in put_into_effect(self._context.models, built, self._built):
                self._note(f"schedule    {line}")
        elif (kept := settings_kept(self._context.models, self._built)) and self._distributed.rank == 0:
            logger.warning("warning: the optimizer's settings of checkpoint %s stay: %s", uuid, kept)
        return checkpoint

    @property
    def _trial_loads(self) -> bool:
        """Whether the trial overrides ``load``, which may load only a part."""
        return overrides(self._trial, "load")


def scramble(models: list[Any]) -> None:
    """Fill every parameter with NaN, so only a load that restores them all can be followed by a number."""
    with torch.no_grad():
        for model in models:
            for parameter in model.module.parameters():
                # Under ZeRO 3 a parameter is a placeholder; its partition on this rank is ``ds_tensor``.
                getattr(parameter, "ds_tensor", parameter).data.fill_(float("nan"))
