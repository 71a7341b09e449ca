"""``result.json``: how a run ended, for programs. Nothing that is printed for people has to be parsed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from determined_ds.documents.writing import write_whole
from determined_ds.errors import EXIT_CONFIG
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.run_dir import CHECKPOINTS, METRICS, RESULT


def write_result(run_dir: Path, *, exit_code: int, stopped: bool, trial_seed: int) -> None:
    """Write how a run ended, whole or not at all. A disk that is full has been reported by the run itself.

    ``status`` is ``completed``, ``stopped`` (by the user), ``invalid`` (it cannot run) or ``failed``.

    Args:
        run_dir: The run directory.
        exit_code: Of the run.
        stopped: Whether the user stopped it, and nothing else went wrong.
        trial_seed: What the trial's generators started from.
    """
    status = {0: "completed", EXIT_CONFIG: "invalid"}.get(exit_code, "failed")
    result = {
        "status": "stopped" if stopped else status,
        "steps_completed": steps_completed(run_dir),
        "trial_seed": trial_seed,
    }
    with contextlib.suppress(OSError):
        write_whole(run_dir / RESULT, json.dumps(result, indent=2) + "\n")


def steps_completed(run_dir: Path) -> int:
    """Batches trained, as far as the run's metrics and checkpoints tell; 0 where neither does."""
    steps = [checkpoint.steps_completed for checkpoint in checkpoints_in(run_dir / CHECKPOINTS)]
    with contextlib.suppress(OSError):
        for line in (run_dir / METRICS).read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                steps.append(int(json.loads(line)["steps_completed"]))
    return max(steps, default=0)
