"""What a checkpoint holds, and how it is written and read back. Determined's own layout:

    <uuid>/metadata.json                     steps_completed ...; written last, so its presence means complete
           load_data.json                    experiment config and hyperparameters
           trial_state.json                  where training stands
           det_state_dict_rank<R>.pth        random-number generators and callbacks of a rank
           model<I>/...  latest              DeepSpeed's own files of each engine
"""

from __future__ import annotations

import json
import pathlib
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import determined as det
import numpy as np
import torch

from determined_ds.errors import CheckpointError

STATE = "trial_state.json"


@dataclass(kw_only=True)
class TrialState:
    """Where training stands.

    Args:
        trial_id: The trial that wrote it: another trial that starts from it begins to count anew.
        batches_trained: Optimizer steps since the start of training.
        epochs_trained: Whole epochs among them.
        last_validation: ``batches_trained`` at the last validation.
        last_checkpoint: ``batches_trained`` at the last checkpoint.
    """

    trial_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
    last_validation: int = -1
    last_checkpoint: int = -1


class Checkpoints:
    """Saves and loads the checkpoints of a run.

    Args:
        trial: Its ``save`` and ``load`` do the engines' part.
        context: Its core context stores the files, here or on the cluster.
        callbacks: Name -> callback; their state is kept.
    """

    def __init__(self, trial: Any, context: Any, callbacks: dict[str, Any]) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks

    def save(self, state: TrialState) -> str:
        """Write a checkpoint; a collective.

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
            self._write(path, state)
        for callback in self._callbacks.values():
            callback.on_checkpoint_upload_end(uuid=uuid)
        return str(uuid)

    def _write(self, path: pathlib.Path, state: TrialState) -> None:
        path.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "callbacks": {name: callback.state_dict() for name, callback in self._callbacks.items()},
            "rng_state": _rng_state(self._context.device),
        }
        for callback in self._callbacks.values():
            callback.on_checkpoint_save_start(checkpoint)
        torch.save(checkpoint, path / f"det_state_dict_rank{self._context.distributed.rank}.pth")
        self._trial.save(self._context, path)
        if self._context.distributed.rank == 0:
            (path / STATE).write_text(json.dumps(asdict(state)) + "\n")
            (path / "load_data.json").write_text(json.dumps(self._load_data()) + "\n")
        for callback in self._callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))

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

    def load(self, uuid: str, *, trial_id: int) -> TrialState:
        """Read a checkpoint back; a collective.

        Args:
            uuid: Of the checkpoint.
            trial_id: This trial; a checkpoint of another one gives its weights, not its position.

        Raises:
            CheckpointError: it lacks this rank's part, or DeepSpeed refuses it.
        """
        with self._context._core.checkpoint.restore_path(uuid) as path:
            return self._read(Path(path), uuid, trial_id)

    def _read(self, path: Path, uuid: str, trial_id: int) -> TrialState:
        rank = self._context.distributed.rank
        file = path / f"det_state_dict_rank{rank}.pth"
        if not file.exists():
            have = len(list(path.glob("det_state_dict_rank*.pth")))
            raise CheckpointError(
                f"checkpoint {uuid} was written by {have} ranks and has no part for rank {rank}: "
                f"resume with {have} slots"
            )
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        for callback in self._callbacks.values():
            callback.on_checkpoint_load_start(checkpoint)
        try:
            self._trial.load(self._context, path)
        except AssertionError as error:
            raise CheckpointError(
                f"DeepSpeed refuses checkpoint {uuid}: {error} Resume with the ZeRO stage, the slots and "
                "the model that wrote it."
            ) from error
        _set_rng_state(checkpoint.get("rng_state", {}), self._context.device)
        for name, state in checkpoint.get("callbacks", {}).items():
            if name in self._callbacks:
                self._callbacks[name].load_state_dict(state)
        state = TrialState(**json.loads((path / STATE).read_text()))
        return state if state.trial_id == trial_id else TrialState(trial_id=trial_id)


def _rng_state(device: torch.device) -> dict[str, Any]:
    """Every generator's state, of types that ``torch.load(weights_only=True)`` takes."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "random_rng_state": random.getstate(),
    }
    if device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    if "cpu_rng_state" in state:
        torch.random.set_rng_state(state["cpu_rng_state"])
    if "np_rng_state" in state:
        name, keys, position, has_gauss, cached = state["np_rng_state"]
        np.random.set_state((name, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    if "random_rng_state" in state:
        random.setstate(state["random_rng_state"])
    if device.type == "cuda" and "gpu_rng_state" in state:
        torch.cuda.set_rng_state(state["gpu_rng_state"], device)


def spoil(models: list[Any]) -> None:
    """Fill every parameter with NaN, so that only a load that restores them all can be followed by a number."""
    with torch.no_grad():
        for model in models:
            for parameter in model.module.parameters():
                # Under ZeRO 3 a parameter is a placeholder; its partition on this rank is ``ds_tensor``.
                getattr(parameter, "ds_tensor", parameter).data.fill_(float("nan"))
