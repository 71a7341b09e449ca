"""Training whose checkpoints go to object storage, by Determined's own storage managers; called in ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.object_storage import clients_of, manager_of


def objects_of(folder: Path) -> Path:
    """Where GCS and Azure keep their objects, for runs in a folder."""
    return folder / "objects"


@contextlib.contextmanager
def opened(run_dir: Path, storage: dict[str, Any], *, zero: int = 1, pipe: int = 1) -> Iterator[Any]:
    """In a rank: a trial of ``trials.py`` whose checkpoints go to a ``checkpoint_storage``."""
    from determined import core

    from determined_ds import open_context
    from tests.interrupted.trials import PipelineVictim, Victim

    ds_config = {
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 8, "pipe_parallel_size": pipe, "deepspeed_config": ds_config}
    with (
        clients_of(storage, objects_of(run_dir.parent)),
        open_context(hparams=hparams, run_dir=str(run_dir), accelerator="cpu") as context,
    ):
        manager = manager_of(storage, run_dir / "tmp")
        context._core.checkpoint = core.DummyCheckpointContext(context.distributed, manager)
        yield (Victim if pipe == 1 else PipelineVictim)(context)


def train(
    run_dir: str,
    storage: dict[str, Any],
    batches: int,
    latest: str | None = None,
    *,
    save_total_limit: int | None = None,
    **how: Any,
) -> tuple[list[str], str]:
    """In a rank: train so far, with a checkpoint after each third batch.

    Args:
        run_dir: The run directory.
        storage: The ``checkpoint_storage``.
        batches: The number of batches.
        latest: The checkpoint to resume from.
        save_total_limit: How many checkpoints are kept.
        how: Of ``opened``.

    Returns:
        The checkpoints that were written, and what was raised.
    """
    from determined.pytorch import Batch

    from determined_ds import DeterminedDSError, Trainer

    written: list[str] = []
    with opened(Path(run_dir), storage, **how) as trial:
        trial.remembering.on_checkpoint_upload_end = lambda uuid: written.append(uuid)
        try:
            Trainer(trial, trial.context).fit(
                max_length=Batch(batches),
                checkpoint_period=Batch(3),
                reporting_period=Batch(3),
                validation_period=Batch(3),
                save_total_limit=save_total_limit,
                latest_checkpoint=latest,
            )
        except DeterminedDSError as error:
            return written, str(error)
    return written, ""


def fetched(storage: dict[str, Any], uuid: str, run_dir: Path) -> Path:
    """Download a checkpoint into a run directory. Returns its folder."""
    path = run_dir / "checkpoints" / uuid
    with clients_of(storage, objects_of(run_dir.parent)):
        manager_of(storage, run_dir / "tmp").download(uuid, path)
    return path
