"""Results as ``det-ds compare`` writes them to results.json, without a comparison."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from determined_ds import Results, load_results

MIB = 2**20
MEASURED, OUT_OF_MEMORY, CANNOT_RUN = "measured", "out of memory", "cannot run"


def repetition(steps: Sequence[float] = (0.2, 0.1, 0.3), **others: Any) -> dict[str, Any]:
    """One start: two steps of warm-up, and a loss that falls by 0.1 a step to 3.0."""
    num = 2 + len(steps)
    return {
        "run_dir": "runs/zero1-x2/1",
        "step_seconds": list(steps),
        "losses": [3.0 + 0.1 * (num - 1 - step) for step in range(num)],
        "warmup": 2,
        "peak_memory_bytes_by_rank": [690 * MIB, 700 * MIB],
        "model_state_bytes_by_rank": [12 * MIB, 11 * MIB],
        **others,
    }


def row(name: str = "zero1", *repetitions: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A strategy that was measured: by default 32 samples of 128 tokens a step, on two replicas."""
    return {
        "name": name,
        "slots": 2,
        "status": MEASURED,
        "zero_stage": 1,
        "precision": "fp32",
        "micro_batch_size": 16,
        "accumulation": 1,
        "replicas": 2,
        "pipe_parallel_size": 1,
        "samples_per_step": 32,
        "tokens_per_sample": 128,
        "repetitions": list(repetitions or (repetition(),)),
        **others,
    }


def failed(
    name: str, status: str = OUT_OF_MEMORY, reason: str = "it asked for 2 GiB", **others: Any
) -> dict[str, Any]:
    """A strategy that was not measured."""
    return {"name": name, "slots": 2, "status": status, "reason": reason, **others}


def results(*rows: dict[str, Any], **others: Any) -> Results:
    """Rows as they are read from results.json, of a comparison on a CPU."""
    content = {
        "kind": "results of determined_ds",
        "format": 3,
        "title": "gpt2_const",
        "command": "det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1",
        "created": "2026-11-20T18:40:00",
        "machine": "x86_64, 2 CPU cores",
        "accelerator": "cpu",
        "steps": 3,
        "rows": rows,
        **others,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        path.write_text(json.dumps(content))
        return load_results(path)


def _spans(*passes: tuple[str, int, int, float, float]) -> list[dict[str, Any]]:
    """Kind, part, micro-batch, start and end in units of 10 ms; each pass starts 1 ms late."""
    return [
        {"op": [kind, part, micro], "start": start / 100 + 0.001, "end": end / 100}
        for kind, part, micro, start, end in passes
    ]


# A step of 1F1B on two ranks with two micro-batches.
PIPELINE_STEP = {
    "pipeline": {"schedule": "1f1b", "ranks": 2, "micro_batches": 2, "chunks": 1},
    "spans": [
        _spans(("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("B", 0, 0, 4, 6), ("B", 0, 1, 7, 9)),
        _spans(("F", 1, 0, 1, 2), ("B", 1, 0, 2, 4), ("F", 1, 1, 4, 5), ("B", 1, 1, 5, 7)),
    ],
}


def comparison() -> list[dict[str, Any]]:
    """Two strategies on one slot and on two, a pipeline with its bubble, one without memory, one that cannot run."""
    one = {"slots": 1, "replicas": 1, "micro_batch_size": 32}
    pipe = {"replicas": 1, "pipe_parallel_size": 2, "accumulation": 2, "zero_stage": 0}
    small = {"peak_memory_bytes_by_rank": [511 * MIB, 500 * MIB], "bubble": 0.35, "bubble_ideal": 1 / 3}
    drawn = repetition([0.28, 0.28], pipeline_step=PIPELINE_STEP, **small)
    return [
        row("zero0", repetition([0.40, 0.41]), repetition([0.42, 0.43]), **one),
        row("zero1", repetition([0.44, 0.44]), repetition([0.45, 0.45]), **one),
        failed("zero3", slots=1),
        row("zero0", repetition([0.21, 0.22]), repetition([0.22, 0.22])),
        row("zero1", repetition([0.24, 0.24]), repetition([0.25, 0.26])),
        row("pipeline", drawn, repetition([0.29, 0.29], **small), **pipe),
        failed("pipeline", CANNOT_RUN, "2 stages need 2 slots or more", slots=1, pipe_parallel_size=2),
    ]
