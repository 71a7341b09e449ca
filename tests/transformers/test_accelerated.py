"""Accelerate trains with the reconciled configuration, each rank on its share of the data."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.command import ROOT, det_ds


def test_two_ranks_share_the_data(tmp_path: Path) -> None:
    experiment = {
        "name": "accelerated",
        "entrypoint": "python3 -m tests.transformers.accelerated_script",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "deepspeed_config": {"type": "const", "val": {"zero_optimization": {"stage": 1}}},
        },
        "searcher": {"name": "single", "metric": "eval_loss"},
    }
    config = tmp_path / "accelerated.yaml"
    config.write_text(yaml.safe_dump(experiment))
    done = det_ds("run", config, ROOT, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    records = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [record["steps_completed"] for record in records] == [4]
    assert records[0]["metrics"].items() >= {"ranks": 2, "batches": 8, "steps": 4, "samples": 8}.items()
