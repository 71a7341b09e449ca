"""Where training stands and what trial it is, as a checkpoint records them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.errors import CheckpointError
from determined_ds.experiment.secrets import masked
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.protocol.elastic import LOAD_DATA, WRITTEN_BY

STATE = "trial_state.json"
FIX = "resume from another checkpoint, or copy its files again"


@dataclass(kw_only=True)
class TrialState:
    """Where training stands.

    Args:
        trial_id: The trial that wrote it; another trial that starts from it counts from 0.
        batches_trained: Optimizer steps since the start of training.
        epochs_trained: Whole epochs among them.
        last_validation: ``batches_trained`` at the last validation.
        last_checkpoint: ``batches_trained`` at the last checkpoint.
        kept: Uuids of the existing checkpoints, oldest first.
        best: Uuid of the one whose validation was best.
    """

    trial_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
    last_validation: int = -1
    last_checkpoint: int = -1
    kept: list[str] = field(default_factory=list)
    best: str = ""


def read_state(path: Path, uuid: str) -> TrialState:
    """Where training stood, from our own file or that of Determined's loop.

    Raises:
        CheckpointError: the checkpoint has neither.
    """
    try:
        if (path / STATE).exists():
            found = json.loads((path / STATE).read_text())
        else:
            with (path / "trial_state.pkl").open("rb") as file:
                found = _PlainUnpickler(file).load()
            positions = {
                "last_validation": found.get("last_val", -1),
                "last_checkpoint": found.get("last_ckpt", -1),
            }
            found = {**found, **positions}
    except FileNotFoundError:
        message = f"checkpoint {uuid} has no {STATE}: it was not written by a DeepSpeedTrial"
        raise CheckpointError(f"{message}\n  fix: {FIX}") from None
    except (OSError, ValueError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"where training stood in checkpoint {uuid} cannot be read: {error}\n  fix: {FIX}"
        ) from None
    defaults = asdict(TrialState())
    known = {name: found[name] for name in defaults if isinstance(found, dict) and name in found}
    odd = [name for name, value in known.items() if not isinstance(value, type(defaults[name]))]
    if odd or "batches_trained" not in known:
        name = odd[0] if odd else "batches_trained"
        raise CheckpointError(
            f"checkpoint {uuid} says {name} = {known.get(name)!r} of where training stood\n  fix: {FIX}"
        )
    return TrialState(**known)


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"trial_state.pkl names {module}.{name}")


def state_files(
    trial: Any, context: Any, state: TrialState, written_by: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Name -> text of the files that describe the state and the trial, without secrets.

    ``load_data.json`` is as in Determined's own checkpoints, with the seed and the DeepSpeed configuration added.

    Args:
        trial: The trial.
        context: Its context.
        state: Where training stands.
        written_by: The ranks, see :func:`~determined_ds.protocol.elastic.written_by`.
    """
    try:
        exp_conf = context.get_experiment_config()
    except ValueError:
        exp_conf = None
    try:
        hparams = context.get_hparams()
    except ValueError:  # a script that opened its context without any
        hparams = None
    kind = type(trial)
    load_data = {
        "trial_type": "DeepSpeedTrial",
        "experiment_config": exp_conf and masked(exp_conf),
        "hparams": hparams and masked({"hyperparameters": hparams})["hyperparameters"],
        "deepspeed_config": masked({"deepspeed_config": context.resolved.ds_config})["deepspeed_config"],
        "trial_seed": context.get_trial_seed(),
        WRITTEN_BY: dict(written_by or {}),
        "trial_cls_spec": getattr(trial, "class_spec", f"{kind.__module__}:{kind.__qualname__}"),
        "is_trainer": True,
    }
    files = {STATE: json.dumps(asdict(state)) + "\n", LOAD_DATA: json.dumps(load_data) + "\n"}
    partition = getattr(context, "partition", None)
    return files if partition is None else {**files, PARTITION: partition}
