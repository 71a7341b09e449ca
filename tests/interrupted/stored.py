"""Training whose checkpoints go to object storage, by Determined's own storage managers; called in ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.object_storage import manager_of
from tests.train.small import fit, hyperparameters


def train(
    run_dir: Path,
    storage: dict[str, Any],
    batches: int,
    latest: str | None = None,
    *,
    zero: int = 1,
    pipe: int = 1,
    **arguments: Any,
) -> tuple[list[str], str]:
    """In a rank: train a trial of ``trials.py`` so far, with a checkpoint after each third batch.

    Returns the checkpoints that were written, and what was raised.
    """
    from determined import core

    from determined_ds import DeterminedDSError
    from tests.interrupted.trials import PipelineVictim, Victim

    written: list[str] = []

    class Stored(Victim if pipe == 1 else PipelineVictim):  # type: ignore[misc]
        def prepare(self) -> None:
            super().prepare()
            manager = manager_of(storage, run_dir / "tmp")
            self.context._core.checkpoint = core.DummyCheckpointContext(self.context.distributed, manager)
            self.remembering.on_checkpoint_upload_end = lambda uuid: written.append(uuid)

    periods = ("checkpoint_period", "reporting_period", "validation_period")
    how: dict[str, Any] = dict.fromkeys(periods, ("batches", 3))
    how |= {"latest_checkpoint": latest, "max_length": ("batches", batches), **arguments}
    hparams = {**hyperparameters(zero), "pipe_parallel_size": pipe}
    try:
        fit(run_dir, Stored, hparams=hparams, **how)
    except DeterminedDSError as error:
        return written, str(error)
    return written, ""


def fetched(storage: dict[str, Any], uuid: str, run_dir: Path) -> Path:
    """Download a checkpoint into a run directory. Returns its folder."""
    path = run_dir / "checkpoints" / uuid
    manager_of(storage, run_dir / "tmp").download(uuid, path)
    return path
