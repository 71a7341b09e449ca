"""A run killed with SIGKILL at any moment and resumed ends bit for bit as one that was never interrupted.

Parameters, optimizer state, generators, callbacks, unreported metrics, custom reducers and the order of the data:
with dropout, an augmentation that draws random numbers, accumulation and data-loader workers; checkpoints are written
at once (ZeRO 0) or while training continues.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import ROOT, det_ds, det_ds_program
from tests.runtime.victim import differences, last_words

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
    pipe: int = 1,
    accumulation: int = 1,
    num_workers: int = 0,
    asynchronous: bool = False,
    schedule: str = "1f1b",
    sequence: int = 1,
    tensor: int = 1,
    is_timed: bool = False,
) -> dict[str, Any]:
    trial = "victim:PipelineVictim" if pipe > 1 else "victim:Victim"
    if is_timed:
        trial = "victim:TimedVictim"
    if sequence > 1:
        trial = "sliced_victim:SlicedVictim"
    ds_config = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        **({"tensor_parallel": {"partition_config": CUT}} if tensor > 1 else {}),
    }
    return {
        "name": "victim",
        "entrypoint": f"python3 -m determined_ds.train tests.runtime.{trial}",
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


def run(config: Path, run_dir: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``det-ds run`` to its end, with the victim's orders in the environment."""
    return det_ds("run", config, ROOT, "--run-dir", run_dir, *options, env=env)


def kill_points(strategy: str) -> list[str]:
    """Six moments, drawn from a seed: in, before and after a batch, in a validation, in and after a checkpoint."""
    draw = random.Random(strategy)
    points = [f"before:{draw.randint(1, 3)}", f"torn:{draw.choice([3, 6, 9])}"]
    points.append(f"saved:{draw.choice([5, 6, 9, 10, 12, 15])}")
    points.append(f"validating:{draw.choice([5, 10, 15])}")
    points += [f"{draw.choice(['before', 'after'])}:{draw.randint(4, NUM_BATCHES)}" for _ in range(2)]
    return sorted(points, key=lambda point: int(point.partition(":")[2]))


@pytest.mark.parametrize("kills", ["a few", "many"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_and_resumed_ends_as_if_never_interrupted(strategy: str, kills: str, tmp_path: Path) -> None:
    """With many kills, the last of them, the end after it and the whole run are programs, and not forks."""
    config = tmp_path / "victim.yaml"
    config.write_text(yaml.safe_dump(experiment(**STRATEGIES[strategy])))
    last_start = det_ds_program if kills == "many" else det_ds
    whole = last_start("run", config, ROOT, "--run-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    points = kill_points(strategy)
    points = (
        points if kills == "many" else [point for point in points if point.startswith(("torn", "validating"))]
    )
    command: list[str | Path] = ["run", config, ROOT, "--run-dir", tmp_path / "killed"]
    for point in points:
        start = last_start if point == points[-1] else det_ds
        killed = start(*command, env={"KILL_AT": point})
        assert killed.returncode == 1, (point, killed.stdout, killed.stderr)
        command = [*command[:5], "--resume"]
    resumed = last_start(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "killed")) == []


def test_stages_cut_by_their_times_are_cut_as_before(tmp_path: Path) -> None:
    """Killed and resumed, when other layers take long: what was measured first holds, bit for bit."""
    config = tmp_path / "victim.yaml"
    config.write_text(yaml.safe_dump(experiment(zero=1, pipe=2, accumulation=2, is_timed=True)))
    whole = run(config, tmp_path / "whole", SLOW_LAYER="0")
    assert whole.returncode == 0, whole.stderr
    killed = run(config, tmp_path / "killed", SLOW_LAYER="0", KILL_AT="after:8")
    assert killed.returncode == 1, killed.stderr
    resumed = run(config, tmp_path / "killed", "--resume", SLOW_LAYER="3")
    assert resumed.returncode == 0, resumed.stderr
    cuts = [
        json.loads((tmp_path / name / "partition.json").read_text())["bounds"] for name in ("whole", "killed")
    ]
    assert cuts == [[0, 1, 4]] * 2
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "killed")) == []
