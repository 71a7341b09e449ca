"""Experiments of the trials and scripts in this folder, under every strategy."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.command import ROOT, det_ds

SCRIPT = "tests/interrupted/script.py"
HF_BATCHES = 12
NUM_BATCHES = 17

STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1, "asynchronous": True, "accumulation": 2},
    "zero2": {"zero": 2, "asynchronous": True, "num_workers": 2},
    "zero3": {"zero": 3, "asynchronous": True},
    "pipeline": {"zero": 1, "asynchronous": True, "pipe": 2, "accumulation": 2, "num_workers": 2},
    "sequence": {"zero": 3, "asynchronous": True, "sequence": 2, "accumulation": 2},
    "gpipe": {"zero": 1, "pipe": 2, "accumulation": 2, "schedule": "gpipe"},
    "zb-h1": {"zero": 0, "pipe": 2, "accumulation": 2, "schedule": "zb-h1"},
    "interleaved": {"zero": 1, "pipe": 2, "accumulation": 2, "schedule": "interleaved"},
    "dualpipev": {"zero": 1, "asynchronous": True, "pipe": 2, "accumulation": 4, "schedule": "dualpipev"},
    "tensor": {"zero": 1, "asynchronous": True, "tensor": 2, "accumulation": 2},
}
# The first layer by rows, the second by columns; dropout between them is of each rank's own part.
CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": ["0[.]0[.]weight$"], "partition_type": "column"},
        {"patterns": ["1[.]0[.]weight$"], "partition_type": "row"},
    ],
}


def experiment(
    *,
    zero: int,
    trial: str = "",
    pipe: int = 1,
    accumulation: int = 1,
    num_workers: int = 0,
    asynchronous: bool = False,
    schedule: str = "1f1b",
    sequence: int = 1,
    tensor: int = 1,
    optimizer: str = "AdamW",
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A trial of ``trials.py`` on two ranks."""
    module = "sliced_trial" if sequence > 1 else "trials"
    trial = trial or ("SlicedVictim" if sequence > 1 else "PipelineVictim" if pipe > 1 else "Victim")
    sharded = {"reduce_scatter": False} if optimizer == "Muon" and zero == 3 else {}
    ds_config = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero, **sharded},
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        **({"tensor_parallel": {"partition_config": CUT}} if tensor > 1 else {}),
    }
    ds_config |= dict(more or {})
    ds_config["zero_optimization"] = {"stage": zero, **sharded, **ds_config["zero_optimization"]}
    return {
        "name": "victim",
        "entrypoint": f"python3 -m determined_ds.train tests.interrupted.{module}:{trial}",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "pipe_parallel_size": pipe,
            "model_parallel_size": tensor,
            "pipe_schedule": schedule,
            "sequence_parallel_size": sequence,
            "num_workers": num_workers,
            "deepspeed_config": {"type": "const", "val": ds_config},
            "fit": {
                "max_length": {"batches": NUM_BATCHES},
                "validation_period": {"batches": 5},
                "checkpoint_period": {"batches": 3},
                "reporting_period": {"batches": 4},
                "asynchronous_checkpoints": asynchronous,
            },
        },
        "searcher": {"name": "single", "metric": "validation_loss"},
        "reproducibility": {"experiment_seed": 7},
    }


def session_experiment(
    form: str, *, max_length: int | None = None, zero: int = 1, accumulation: int = 2
) -> dict[str, Any]:
    """The script of ``script.py`` on two ranks."""
    config = experiment(zero=zero, accumulation=accumulation)
    config["entrypoint"] = f"python3 -m determined.launch.torch_distributed python3 {SCRIPT} {form}"
    config["hyperparameters"]["fit"] = {
        "checkpoint_period": {"batches": 3},
        "reporting_period": {"batches": 4},
        "asynchronous_checkpoints": form == "range",
        **({"max_length": {"batches": max_length}} if max_length else {}),
    }
    return config


def run(config: Path, run_dir: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``det-ds run`` to its end, with the victim's orders in the environment."""
    return det_ds("run", config, ROOT, "--run-dir", run_dir, *options, env=env)


def hf_experiment(zero_stage: int) -> dict[str, Any]:
    """The script of ``hf_script.py`` on two ranks, under a ZeRO stage."""
    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    return {
        "name": "victim",
        "entrypoint": "python3 -m tests.interrupted.hf_script",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "learning_rate": 0.01,
            "warmup_num_steps": 4,
            "deepspeed_config": {"type": "const", "val": ds_config},
            "fit": {
                "max_length": {"batches": HF_BATCHES},
                "validation_period": {"batches": 4},
                "checkpoint_period": {"batches": 3},
                "reporting_period": {"batches": 2},
            },
        },
        "searcher": {"name": "single", "metric": "eval_loss"},
        "reproducibility": {"experiment_seed": 7},
    }
