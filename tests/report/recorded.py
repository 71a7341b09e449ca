"""Run directories as a run leaves them, without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.protocol.launches import Launch, launch_line
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.runs.run_view import RunView

BEGAN = 1_795_400_000.0  # seconds since the epoch


def launch(**more: Any) -> Launch:
    """A launch on two slots, as a run of GPT-2 has it."""
    given: dict[str, Any] = {
        "time": BEGAN,
        "name": "gpt2",
        "runs": "model_defs.gpt2.trial:GPT2Trial",
        "command": "det-ds run gpt2.yaml .",
        "slots": 2,
        "strategy": "ZeRO 1",
        "global_batch_size": 32,
        "micro_batch_size": 16,
        "accumulation": 1,
        "replicas": 2,
        "trial_seed": 7,
        "hyperparameters": {"learning_rate": 0.001, "fit": {"max_length": {"batches": 40}}},
        "ds_config": {"train_batch_size": 32, "zero_optimization": {"stage": 1}},
        "origins": {
            "train_batch_size": "global_batch_size, gpt2.yaml:11",
            "zero_optimization": "zero1.json:6",
        },
        "versions": {"torch": "2.13.0"},
        "machine": {"host": "here", "cores": 2, "memory_bytes": 2**34},
    }
    return Launch(**{**given, **more})


def training(step: int, *, time: float | None = None, **metrics: Any) -> dict[str, Any]:
    """A training report, a second after the one before, unless its time is given."""
    at = BEGAN + step if time is None else time
    return {"group": "training", "steps_completed": step, "metrics": metrics, "time": at}


def validation(step: int, *, time: float | None = None, **metrics: Any) -> dict[str, Any]:
    """A validation at the same time."""
    return {**training(step, time=time, **metrics), "group": "validation"}


def course(steps: int, *, slope: float = 0.1) -> list[dict[str, Any]]:
    """So many training reports, and a validation at each tenth batch."""
    records = []
    for step in range(1, steps + 1):
        loss = 5.0 - slope * step
        records.append(training(step, loss=loss, lr=1e-3, samples_per_second=100.0 + step, batches=step))
        if step % 10 == 0:
            records.append(validation(step, validation_loss=loss + 0.123456789))
    return records


def recorded(
    path: Path,
    records: Sequence[Mapping[str, Any]] = (),
    *,
    launches: Sequence[Launch] | None = None,
    result: Mapping[str, Any] | None = None,
    checkpoints: Sequence[int] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run directory.

    Args:
        path: Of it.
        records: Of its metrics.
        launches: One by default; () writes no file, as an earlier version did.
        result: How it ended; None of one that has not.
        checkpoints: Batches after which one was written.
        config: Of the experiment; by default one that is judged by ``validation_loss``.
    """
    path.mkdir(parents=True)
    there = RunDir(path)
    given = {"name": "gpt2", "searcher": {"metric": "validation_loss", "smaller_is_better": True}}
    there.experiment.write_text(json.dumps(given if config is None else config))
    there.metrics.touch()
    for record in records:
        append_record(there.metrics, record)
    lines = "".join(launch_line(each) for each in ([launch()] if launches is None else launches))
    if lines:
        there.launches.write_text(lines)
    if result is not None:
        there.result.write_text(json.dumps(result))
    for step in checkpoints:
        folder = there.checkpoints / f"uuid-{step}"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text(json.dumps({"steps_completed": step}))
    return path


def shown(path: Path, label: str = "run") -> RunView:
    """A run directory as it is shown."""
    from determined_ds.report.runs.located_runs import read_one

    return read_one(path, label)
