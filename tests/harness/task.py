"""What a cluster puts into the environment of a trial's container."""

from __future__ import annotations

import json
from typing import Any

ENTRYPOINT = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:Trial"
CONFIG = {
    "entrypoint": ENTRYPOINT,
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "validation_loss"},
}
HPARAMS = {
    "global_batch_size": 8,
    "deepspeed_config": {"zero_optimization": {"stage": 1}},
    "fit": {"max_length": {"batches": 4}},
}
BAD_BATCH = {"global_batch_size": 9}
ON_TWO = {"DET_SLOT_IDS": "[0, 1]"}


def trial(hparams: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> dict[str, str]:
    """All of it but the slots."""
    return {
        "DET_TASK_TYPE": "TRIAL",
        "DET_TRIAL_ID": "7",
        "DET_TRIAL_SEED": "3",
        "DET_STEPS_COMPLETED": "0",
        "DET_HPARAMS": json.dumps({**HPARAMS, **(hparams or {})}),
        "DET_EXPERIMENT_CONFIG": json.dumps({**CONFIG, **(config or {})}),
    }
