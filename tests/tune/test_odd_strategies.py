"""``det-ds autotune`` never selects what trains otherwise or crashes, however fast it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from determined_ds import load_results
from tests.harness.command import ROOT, det_ds

# ZeRO 0 reports another loss, and ZeRO 2 ends. The experiment has ZeRO 1.
ODD = """

class OddTrial(TinyTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if self.resolved.zero_stage == 2:
            raise ValueError("no such kernel")
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**found, "loss": 1.5 * found["loss"]} if self.resolved.zero_stage == 0 else found
"""


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    """A context directory whose trial trains as it should under ZeRO 1 and 3 alone."""
    ignored = shutil.ignore_patterns("__pycache__")
    folder = Path(shutil.copytree(ROOT / "tests" / "cli" / "own_model", tmp_path / "odd", ignore=ignored))
    with (folder / "trial.py").open("a") as file:
        file.write(ODD)
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("trial:TinyTrial", "trial:OddTrial"))
    return folder


def test_a_strategy_that_crashes_or_has_another_loss_is_reported_and_never_selected(
    odd_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "tuned"
    options = ["--over", "zero_stage", "--budget", "8", "--steps", "5", "--warmup", "1", "--slots", "1"]
    done = det_ds("autotune", odd_model / "experiment.yaml", odd_model, *options, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    rows = {row.zero_stage: row for row in load_results(run_dir / "results.json").rows}
    assert [rows[stage].status for stage in (1, 2, 0)] == ["measured", "failed", "failed"]
    assert rows[2].reason == "ValueError: no such kernel"
    assert rows[0].reason.startswith("rejected: its first loss is")
    best = yaml.safe_load((run_dir / "best.yaml").read_text())
    assert best["hyperparameters"]["deepspeed_config"]["val"]["zero_optimization"]["stage"] in (1, 3)


def test_an_experiment_that_does_not_run_as_it_is_ends_the_tuning(odd_model: Path, tmp_path: Path) -> None:
    """Nothing could be held against it."""
    stage = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=2"
    options = ["--over", "zero_stage", "--budget", "4", "--steps", "5", "--warmup", "1", "--slots", "1"]
    words = [
        odd_model / "experiment.yaml",
        odd_model,
        *options,
        "--set",
        stage,
        "--run-dir",
        tmp_path / "run",
    ]
    done = det_ds("autotune", *words)
    assert done.returncode == 2
    assert "the experiment as it is does not run: ValueError: no such kernel" in done.stderr
    assert [row.status for row in load_results(tmp_path / "run" / "results.json").rows] == ["failed"]
    assert not (tmp_path / "run" / "best.yaml").exists()
