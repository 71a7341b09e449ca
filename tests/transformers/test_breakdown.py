"""``fit.breakdown`` of a script of transformers: it trains as ever, and reports the parts of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.run_dir import RunDir
from tests.command import ROOT, det_ds
from tests.transformers.test_resume import experiment

PARTS = ("forward_s", "backward_s", "optimizer_s", "communication_s", "communication_bytes")


def reports(folder: Path, breakdown: bool) -> tuple[list[dict[str, Any]], str]:
    config = experiment(1)
    config["hyperparameters"]["fit"].update({"reporting_period": {"batches": 2}, "breakdown": breakdown})
    folder.mkdir()
    path = folder / "victim.yaml"
    path.write_text(yaml.safe_dump(config))
    done = det_ds("run", path, ROOT, "--run-dir", folder / "run")
    assert done.returncode == 0, done.stderr
    found = read_records(RunDir(folder / "run").metrics, "training")
    return [each["metrics"] for each in found], done.stdout


def test_its_losses_stay_the_same_and_its_steps_are_taken_apart(tmp_path: Path) -> None:
    found, printed = reports(tmp_path / "parts", True)
    plain, _ = reports(tmp_path / "plain", False)
    assert [each["loss"] for each in found] == [each["loss"] for each in plain]
    for metrics in found:
        assert all(metrics[name] > 0 for name in (*PARTS, "mfu", "memory_after_forward_gb"))
    assert not any(word in printed for word in ("time (ms)", "Max_MA", "Comm. Op"))
