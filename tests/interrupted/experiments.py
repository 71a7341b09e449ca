"""Experiments of the trials and scripts in this folder, under every strategy."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.command import ROOT, det_ds

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


def _of_two_ranks(
    entrypoint: str, ds_config: Mapping[str, Any], metric: str = "validation_loss", **hyperparameters: Any
) -> dict[str, Any]:
    return {
        "name": "victim",
        "entrypoint": entrypoint,
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "deepspeed_config": {"type": "const", "val": dict(ds_config)},
            **hyperparameters,
        },
        "searcher": {"name": "single", "metric": metric},
        "reproducibility": {"experiment_seed": 7},
    }


def _each(**batches: int) -> dict[str, Any]:
    return {name: {"batches": count} for name, count in batches.items()}


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
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        **({"tensor_parallel": {"partition_config": CUT}} if tensor > 1 else {}),
        **(more or {}),
    }
    ds_config["zero_optimization"] = {"stage": zero, **sharded, **ds_config.get("zero_optimization", {})}
    periods = _each(max_length=NUM_BATCHES, validation_period=5, checkpoint_period=3, reporting_period=4)
    return _of_two_ranks(
        f"python3 -m determined_ds.train tests.interrupted.{module}:{trial}",
        ds_config,
        pipe_parallel_size=pipe,
        model_parallel_size=tensor,
        pipe_schedule=schedule,
        sequence_parallel_size=sequence,
        num_workers=num_workers,
        fit={**periods, "asynchronous_checkpoints": asynchronous},
    )


def session_experiment(form: str, *, zero: int = 1, accumulation: int = 2) -> dict[str, Any]:
    """The script of ``script.py`` on two ranks."""
    config = experiment(zero=zero, accumulation=accumulation)
    launcher = "python3 -m determined.launch.torch_distributed"
    config["entrypoint"] = f"{launcher} python3 tests/interrupted/script.py {form}"
    periods = _each(checkpoint_period=3, reporting_period=4)
    config["hyperparameters"]["fit"] = {**periods, "asynchronous_checkpoints": form == "range"}
    return config


def hf_experiment(zero_stage: int) -> dict[str, Any]:
    """The script of ``hf_script.py`` on two ranks, under a ZeRO stage."""
    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    return _of_two_ranks(
        "python3 -m tests.interrupted.hf_script",
        ds_config,
        metric="eval_loss",
        learning_rate=0.01,
        warmup_num_steps=4,
        fit=_each(max_length=12, validation_period=4, checkpoint_period=3, reporting_period=2),
    )


def run(config: Path, run_dir: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``det-ds run`` to its end, with the victim's orders in the environment."""
    return det_ds("run", config, ROOT, "--run-dir", run_dir, *options, env=env)
