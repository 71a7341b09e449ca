"""What each rank of a pipeline holds under every schedule: the estimate against real training, within 10 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.ranks import ROOT, Ranks
from tests.memory.estimates import estimate
from tests.memory.piped import train

SAMPLES = 4
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("dualpipev", 2))


def check(ranks: Ranks, folder: Path, schedule: str, chunks: int, method: str = "uniform") -> None:
    """Estimate the experiment, and train it."""
    micro_batches = 3 * ranks.size
    ds_config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    hparams: dict[str, Any] = {
        "global_batch_size": SAMPLES * micro_batches,
        "pipe_parallel_size": ranks.size,
        "pipe_schedule": schedule,
        "pipe_chunks": chunks,
        "partition_method": method,
        "deepspeed_config": ds_config,
    }
    experiment = {
        "name": "piped",
        "entrypoint": "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train "
        "tests.memory.piped:PipedTrial",
        "resources": {"slots_per_trial": ranks.size},
        "hyperparameters": {
            **hparams,
            "deepspeed_config": {"type": "const", "val": ds_config},
            "fit": {"max_length": {"batches": 2}},
        },
        "searcher": {"name": "single", "metric": "validation_loss"},
    }
    (folder / "piped.yaml").write_text(yaml.safe_dump(experiment))
    rows = estimate(folder / "piped.yaml", ROOT)["schedules"]
    [row] = [each for each in rows if each["is_configured"]]
    assert (row["schedule"], row["chunks"]) == (schedule, chunks)
    found = ranks.run(train, folder / "run", hparams)
    # In fp32 a parameter, its gradient and two moments.
    assert [16 * own for _, own in found] == [stage["model_states_bytes"] for stage in row["stages"]]
    held = [stage["activations_bytes"] for stage in row["stages"]]
    assert [most for most, _ in found] == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_two_ranks_hold_what_is_estimated(
    two_ranks: Ranks, tmp_path: Path, schedule: str, chunks: int
) -> None:
    check(two_ranks, tmp_path, schedule, chunks)


def test_layers_are_counted_where_deepspeed_puts_them_by_their_parameters(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    check(two_ranks, tmp_path, "1f1b", 1, "parameters")
