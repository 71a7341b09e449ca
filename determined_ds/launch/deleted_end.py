"""A complete run whose last checkpoint was deleted at its end, as ``checkpoint_storage.save_*`` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from determined_ds.errors import ConfigError
from determined_ds.protocol.checkpoint_files import Checkpoint
from determined_ds.protocol.conclusion import COMPLETED, read_result
from determined_ds.protocol.run_dir import RunDir, run_dir_problem

ANEW = "start anew in another --run-dir, without --resume"


def deleted_end(there: RunDir, checkpoint: Checkpoint | None) -> Mapping[str, int] | None:
    """The state at the end of a complete run whose last checkpoint was deleted then; None where it is there."""
    result = read_result(there)
    if result is None or result.status != COMPLETED or not result.deleted:
        return None
    last = max(result.deleted, key=lambda each: int(each["steps_completed"]))
    steps = int(last["steps_completed"])
    if steps < result.steps_completed or (checkpoint is not None and checkpoint.steps_completed >= steps):
        return None
    epochs = int(last["epochs_trained"])
    return {"batches_trained": steps, "epochs_trained": epochs, "last_validation": steps}


def check_goes_on(run_dir: Path, deleted: Mapping[str, int] | None) -> None:
    """Check, where a complete run is loaded all the same, that the checkpoint of its end is there.

    Args:
        run_dir: The run directory.
        deleted: From :func:`deleted_end`.

    Raises:
        ConfigError: it was deleted.
    """
    if deleted is not None:
        message = "holds a complete run, and the checkpoint of its end was deleted: checkpoint_storage.save_*"
        raise ConfigError(run_dir_problem(run_dir, message, ANEW))


def instead_of(deleted: Mapping[str, int], there: RunDir, checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """A warning that training resumes before the end of the run.

    Raises:
        ConfigError: no checkpoint is left.
    """
    why = f"the checkpoint of batch {deleted['batches_trained']}, its end, was deleted: checkpoint_storage.save_*"
    if checkpoint is None:
        message = f"holds a complete run and none of its checkpoints; {why}"
        raise ConfigError(run_dir_problem(there.path, message, ANEW))
    return (f"{why}; resuming from batch {checkpoint.steps_completed}",)
