"""Run directories as a run leaves them, without a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_795_400_000.0  # seconds since the epoch


def launch(**more: Any) -> dict[str, Any]:
    """A start of a run of GPT-2 on two slots, as launches.jsonl has it."""
    return {
        "time": BEGAN,
        "kind": "start",
        "name": "gpt2",
        "runs": "model_defs.gpt2.trial:GPT2Trial",
        "command": "det-ds run gpt2.yaml .",
        "slots": 2,
        "accelerator": "cpu",
        "strategy": "ZeRO 1",
        "trial_seed": 7,
        "global_batch_size": 32,
        "micro_batch_size": 16,
        "accumulation": 1,
        "replicas": 2,
        "hyperparameters": {"learning_rate": 0.001, "fit": {"max_length": {"batches": 40}}},
        "ds_config": {"train_batch_size": 32, "zero_optimization": {"stage": 1}},
        "origins": {"train_batch_size": "global_batch_size, yaml:11", "zero_optimization": "zero1.json:6"},
        "versions": {"torch": "2.13.0"},
        "machine": {"host": "here", "cores": 2},
        **more,
    }


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


def line(record: Mapping[str, Any]) -> str:
    """A record as metrics.jsonl has it: numbers that JSON lacks are words."""
    return re.sub(r"(?<=[ \[])(-?Infinity|NaN)", r'"\1"', json.dumps(record)) + "\n"


def recorded(
    path: Path,
    records: Sequence[Mapping[str, Any]] = (),
    *,
    launches: Sequence[Mapping[str, Any]] | None = None,
    result: Mapping[str, Any] | None = None,
    checkpoints: Sequence[int] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run directory; one that has not ended has no ``result``, and ``checkpoints`` are batches."""
    path.mkdir(parents=True)
    given = {"name": "gpt2", "searcher": {"metric": "validation_loss", "smaller_is_better": True}}
    (path / "experiment.yaml").write_text(json.dumps(given if config is None else config))
    (path / "metrics.jsonl").write_text("".join(map(line, records)))
    starts = [launch()] if launches is None else launches
    (path / "launches.jsonl").write_text("".join(json.dumps(each) + "\n" for each in starts))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    for step in checkpoints:
        folder = path / "checkpoints" / f"uuid-{step}"
        (folder / "model0").mkdir(parents=True)
        (folder / "model0/index.json").write_text("{}")
        (folder / "metadata.json").write_text(json.dumps({"steps_completed": step}))
    return path
