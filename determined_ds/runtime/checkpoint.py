"""What a checkpoint holds, and how it is written and read back. Determined's own layout, and a manifest:

    <uuid>/metadata.json                     steps_completed ...; Determined's
           manifest.json                     size and checksum of every file
           load_data.json                    experiment config and hyperparameters
           trial_state.json                  where training stands
           det_state_dict_rank<R>.pth        generators, callbacks, reducers and unreported metrics of a rank
           model<I>/...  latest              DeepSpeed's own files of each engine

Reading one back executes nothing: tensors and plain values only, and the few classes of :data:`ALLOWED`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import determined as det
import torch

from determined_ds.errors import CheckpointError
from determined_ds.runtime.checkpoint_files import (
    damage_in_share,
    files_of,
    fingerprint,
    write_manifest,
)
from determined_ds.runtime.generators import rng_state

STATE = "trial_state.json"


class Stateful(Protocol):
    """Something whose state travels in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@dataclass(kw_only=True)
class TrialState:
    """Where training stands.

    Args:
        trial_id: The trial that wrote it: another trial that starts from it begins to count anew.
        batches_trained: Optimizer steps since the start of training.
        epochs_trained: Whole epochs among them.
        last_validation: ``batches_trained`` at the last validation.
        last_checkpoint: ``batches_trained`` at the last checkpoint.
        kept: Uuids of the checkpoints that are there, oldest first.
        best: Uuid of the one whose validation was best.
    """

    trial_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
    last_validation: int = -1
    last_checkpoint: int = -1
    kept: list[str] = field(default_factory=list)
    best: str = ""


class Checkpoints:
    """Saves and loads the checkpoints of a run.

    Args:
        trial: Its ``save`` and ``load`` do the engines' part.
        context: Its core context stores the files, here or on the cluster.
        callbacks: Name -> callback; their state is kept.
        parts: Name -> what else has a state on each rank.
        total_limit: Checkpoints to keep at most, the best and the newest always among them; None: all.
    """

    def __init__(
        self,
        trial: Any,
        context: Any,
        callbacks: dict[str, Any],
        parts: dict[str, Stateful],
        total_limit: int | None = None,
    ) -> None:
        self._trial = trial
        self._context = context
        self._distributed = context.distributed
        self._callbacks = callbacks
        self._parts = parts
        self._total_limit = total_limit
        self._checked_own_file = False

    # -------------------------------------------------------------------------------------------- save

    def save(self, state: TrialState, *, best: bool = False) -> str:
        """Write a checkpoint; a collective.

        Args:
            state: Where training stands; the new checkpoint is entered into it.
            best: The validation before it was the best so far.

        Returns:
            Its uuid.
        """
        state.last_checkpoint = state.batches_trained
        metadata = {
            "determined_version": det.__version__,
            "steps_completed": state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
        }
        with self._context._core.checkpoint.store_path(metadata, shard=True) as (path, uuid):
            state.kept.append(uuid)
            state.best = uuid if best else state.best
            self._write(Path(path), state)
            self._seal(Path(path), metadata)
        for callback in self._callbacks.values():
            callback.on_checkpoint_upload_end(uuid=uuid)
        self._prune(state)
        return str(uuid)

    def _write(self, path: Path, state: TrialState) -> None:
        path.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "callbacks": {name: callback.state_dict() for name, callback in self._callbacks.items()},
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "rng_state": rng_state(self._context.device),
        }
        for callback in self._callbacks.values():
            callback.on_checkpoint_save_start(checkpoint)
        own = path / f"det_state_dict_rank{self._distributed.rank}.pth"
        torch.save(checkpoint, own)
        self._check_loadable(own)
        self._trial.save(self._context, path)
        if self._distributed.rank == 0:
            (path / STATE).write_text(json.dumps(asdict(state)) + "\n")
            (path / "load_data.json").write_text(json.dumps(self._load_data()) + "\n")
        for callback in self._callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))

    def _check_loadable(self, own: Path) -> None:
        """Find out at the first checkpoint, not at the first resume, that a state cannot be read back."""
        if self._checked_own_file:
            return
        self._checked_own_file = True
        with torch.serialization.safe_globals(ALLOWED):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(own)
        if unsafe:
            raise CheckpointError(
                f"the state of a callback or reducer holds objects of {', '.join(unsafe)}, which a checkpoint "
                "cannot be read back with: return tensors, numbers, strings, lists and dicts from state_dict, "
                "or allow the class by torch.serialization.add_safe_globals"
            )

    def _seal(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write the manifest, once all ranks have written; the ranks of a machine share the reading."""
        self._distributed.allgather(None)
        names = files_of(path)[self._distributed.local_rank :: self._distributed.local_size]
        shares = self._distributed.allgather({name: fingerprint(path / name) for name in names})
        if self._distributed.local_rank == 0:
            write_manifest(path, {name: mark for share in shares for name, mark in share.items()}, metadata)

    def _prune(self, state: TrialState) -> None:
        """Delete the oldest checkpoints over the limit, never the best nor the newest."""
        if self._total_limit is None:
            return
        spare = [uuid for uuid in state.kept[:-1] if uuid != state.best]
        for uuid in spare[: max(0, len(state.kept) - self._total_limit)]:
            state.kept.remove(uuid)
            if self._distributed.rank == 0:
                self._context._core.checkpoint.delete(uuid)

    def _load_data(self) -> dict[str, Any]:
        try:
            exp_conf = self._context.get_experiment_config()
        except ValueError:
            exp_conf = None
        kind = type(self._trial)
        return {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": exp_conf,
            "hparams": self._context.get_hparams(),
            "trial_cls_spec": f"{kind.__module__}:{kind.__qualname__}",
            "is_trainer": True,
        }

    # -------------------------------------------------------------------------------------------- load

    def load(self, uuid: str, *, trial_id: int) -> tuple[TrialState, dict[str, Any]]:
        """Read a checkpoint back; a collective.

        Args:
            uuid: Of the checkpoint.
            trial_id: This trial; a checkpoint of another one gives its weights, not its position.

        Returns:
            Where training stands, and the state of the generators for :func:`set_rng_state`: to be set when
            nothing is left to build, just before the next batch.

        Raises:
            CheckpointError: it is not what was written, lacks this rank's part, or DeepSpeed refuses it.
        """
        with self._context._core.checkpoint.restore_path(uuid) as path:
            self._verify(Path(path), uuid)
            with only_data():
                return self._read(Path(path), uuid, trial_id)

    def _verify(self, path: Path, uuid: str) -> None:
        local_rank, local_size = self._distributed.local_rank, self._distributed.local_size
        damages = self._distributed.allgather(damage_in_share(path, local_rank, local_size))
        found = [damage for damage in damages if damage]
        if found:
            raise CheckpointError(f"checkpoint {uuid} is damaged: {found[0]}")

    def _read(self, path: Path, uuid: str, trial_id: int) -> tuple[TrialState, dict[str, Any]]:
        checkpoint = self._own_part(path, uuid)
        for callback in self._callbacks.values():
            callback.on_checkpoint_load_start(checkpoint)
        try:
            self._trial.load(self._context, path)
        except AssertionError as error:
            raise CheckpointError(
                f"DeepSpeed refuses checkpoint {uuid}: {error} Resume with the ZeRO stage, the slots and "
                "the model that wrote it."
            ) from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"checkpoint {uuid} holds objects that could run code, and is not loaded: {error}"
            ) from error
        state = _read_state(path)
        if state.trial_id != trial_id:
            return TrialState(trial_id=trial_id), {}
        for name, callback_state in checkpoint.get("callbacks", {}).items():
            if name in self._callbacks:
                self._callbacks[name].load_state_dict(callback_state)
        for name, part_state in checkpoint.get("parts", {}).items():
            if name in self._parts:
                self._parts[name].load_state_dict(part_state)
        return state, checkpoint.get("rng_state", {})

    def _own_part(self, path: Path, uuid: str) -> dict[str, Any]:
        rank, size = self._distributed.rank, self._distributed.size
        written_by = len(list(path.glob("det_state_dict_rank*.pth")))
        # All ranks decide alike: with fewer ranks than wrote it, each would find a part and none the whole.
        if written_by != size:
            raise CheckpointError(
                f"checkpoint {uuid} was written by {written_by} ranks, and these are {size}: "
                f"resume with {written_by} slots"
            )
        try:
            part = torch.load(path / f"det_state_dict_rank{rank}.pth", map_location="cpu")
        except (pickle.UnpicklingError, FileNotFoundError) as error:
            raise CheckpointError(
                f"the part of rank {rank} in checkpoint {uuid} cannot be read: {error}"
            ) from error
        assert isinstance(part, dict)
        return part


def _read_state(path: Path) -> TrialState:
    """Where training stood: our own file, or the one of Determined's loop."""
    if (path / STATE).exists():
        found = json.loads((path / STATE).read_text())
    else:
        with (path / "trial_state.pkl").open("rb") as file:
            found = _PlainUnpickler(file).load()
        found = {
            **found,
            "last_validation": found.get("last_val", -1),
            "last_checkpoint": found.get("last_ckpt", -1),
        }
    known = {item.name for item in fields(TrialState)}
    return TrialState(**{name: value for name, value in found.items() if name in known})


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"trial_state.pkl names {module}.{name}")


def _allowed() -> list[Any]:
    """What may be named in a checkpoint besides tensors and plain values: classes that only hold values."""
    import numpy as np
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from numpy._core.multiarray import _reconstruct, scalar

    numpy_dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    return [
        DynamicLossScaler,
        LossScaler,
        ZeroStageEnum,
        fragment_address,
        _reconstruct,
        scalar,
        np.ndarray,
        np.dtype,
        *numpy_dtypes,
        torch.Size,
        torch.device,
    ]


ALLOWED: list[Any] = []


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """Whatever is loaded in here by ``torch.load``, DeepSpeed's own calls included, may execute nothing."""
    if not ALLOWED:
        ALLOWED.extend(_allowed())
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def spoil(models: list[Any]) -> None:
    """Fill every parameter with NaN, so that only a load that restores them all can be followed by a number."""
    with torch.no_grad():
        for model in models:
            for parameter in model.module.parameters():
                # Under ZeRO 3 a parameter is a placeholder; its partition on this rank is ``ds_tensor``.
                getattr(parameter, "ds_tensor", parameter).data.fill_(float("nan"))
