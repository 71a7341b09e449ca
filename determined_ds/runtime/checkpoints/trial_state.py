"""Where training stands, as a checkpoint has it."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

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


def read_state(path: Path) -> TrialState:
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
