"""A run of transformers' Trainer that is stopped or killed, and resumed, ends as one that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.command import ROOT, det_ds

NUM_BATCHES = 12


def experiment(zero_stage: int) -> dict[str, Any]:
    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    return {
        "name": "victim",
        "entrypoint": "python3 -m tests.transformers.victim",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "learning_rate": 0.01,
            "warmup_num_steps": 4,
            "deepspeed_config": {"type": "const", "val": ds_config},
            "fit": {
                "max_length": {"batches": NUM_BATCHES},
                "validation_period": {"batches": 4},
                "checkpoint_period": {"batches": 3},
                "reporting_period": {"batches": 2},
            },
        },
        "searcher": {"name": "single", "metric": "eval_loss"},
        "reproducibility": {"experiment_seed": 7},
    }


def states(run_dir: Path) -> dict[str, Any]:
    """Every tensor and number of the last checkpoint: weights, optimizer, schedule, generators."""
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "completed", result
    assert result["best"]["checkpoint"] is not None
    folder = run_dir / "checkpoints" / result["checkpoint"]["uuid"] / f"checkpoint-{NUM_BATCHES}"
    files = [*folder.rglob("*_states.pt"), *folder.glob("rng_state_*.pth")]
    found: dict[str, Any] = {}
    for file in sorted(files):
        state = torch.load(file, map_location="cpu", weights_only=False)
        found.update({f"{file.name}:{name}": value for name, value in leaves(state)})
    return found


def leaves(state: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(state, dict):
        return [leaf for key in state for leaf in leaves(state[key], f"{name}.{key}")]
    if isinstance(state, (list, tuple)):
        return [leaf for index, each in enumerate(state) for leaf in leaves(each, f"{name}.{index}")]
    return [(name, state)] if isinstance(state, (torch.Tensor, int, float)) else []


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(*(torch.as_tensor(each[name]) for each in (one, other)))]


def validations(run_dir: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [record for record in records if record["group"] == "validation"]
    return [(record["steps_completed"], record["metrics"]["eval_loss"]) for record in found]


@pytest.mark.parametrize(
    ("zero_stage", "ends"),
    [
        pytest.param(1, ["stop:7"], id="zero1 stopped"),
        *(
            pytest.param(
                zero_stage,
                ["step:2", "stop:5", "torn:9", "step:10"],
                id=f"zero{zero_stage}",
                marks=pytest.mark.long("more kills under every ZeRO stage; zero1 stopped is the short one"),
            )
            for zero_stage in range(4)
        ),
    ],
)
def test_resumed_ends_as_if_never_interrupted(zero_stage: int, ends: list[str], tmp_path: Path) -> None:
    """Stopped by SIGTERM in the middle of a pass, killed between checkpoints, or before one is stored."""
    config = tmp_path / "victim.yaml"
    config.write_text(yaml.safe_dump(experiment(zero_stage)))
    whole = det_ds("run", config, ROOT, "--run-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    command: list[str | Path] = ["run", config, ROOT, "--run-dir", tmp_path / "ended"]
    for end in ends:
        ended = det_ds(*command, env={"KILL_AT": end})
        assert ended.returncode == (0 if end.startswith("stop") else 1), (end, ended.stdout, ended.stderr)
        command = [*command[:5], "--resume"]
    resumed = det_ds(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert differences(states(tmp_path / "whole"), states(tmp_path / "ended")) == []
    assert validations(tmp_path / "whole") == validations(tmp_path / "ended")
