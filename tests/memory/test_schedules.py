"""What each rank of a pipeline holds under every schedule: the estimate against real training, within 10 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.ranks import ROOT, Ranks
from tests.memory.estimates import estimate
from tests.memory.piped import train

SAMPLES, MICRO_BATCHES = 4, 6


@pytest.mark.parametrize(
    ("schedule", "chunks", "method"),
    [
        ("gpipe", 1, "uniform"),
        ("1f1b", 1, "uniform"),
        ("1f1b", 1, "parameters"),  # where DeepSpeed cuts by them
        ("interleaved", 2, "uniform"),
        ("zb-h1", 1, "uniform"),
        ("dualpipev", 2, "uniform"),
    ],
)
def test_two_ranks_hold_what_is_estimated(
    two_ranks: Ranks, tmp_path: Path, schedule: str, chunks: int, method: str
) -> None:
    ds_config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    hparams: dict[str, Any] = {
        "global_batch_size": SAMPLES * MICRO_BATCHES,
        "pipe_parallel_size": 2,
        "pipe_schedule": schedule,
        "pipe_chunks": chunks,
        "partition_method": method,
    }
    const = {"deepspeed_config": {"type": "const", "val": ds_config}}
    experiment = {
        "name": "piped",
        "entrypoint": "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train "
        "tests.memory.piped:PipedTrial",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {**hparams, **const, "fit": {"max_length": {"batches": 2}}},
        "searcher": {"name": "single", "metric": "validation_loss"},
    }
    (tmp_path / "piped.yaml").write_text(yaml.safe_dump(experiment))
    schedules = estimate(tmp_path / "piped.yaml", ROOT)["schedules"]
    [row] = [each for each in schedules if each["is_configured"]]
    assert (row["schedule"], row["chunks"]) == (schedule, chunks)
    found = two_ranks.run(train, tmp_path / "run", {**hparams, "deepspeed_config": ds_config})
    # In fp32 a parameter, its gradient and two moments.
    assert [16 * own for _, own in found] == [stage["model_states_bytes"] for stage in row["stages"]]
    held = [stage["activations_bytes"] for stage in row["stages"]]
    assert [most for most, _ in found] == pytest.approx(held, rel=0.1)
