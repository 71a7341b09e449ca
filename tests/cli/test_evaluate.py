"""``det-ds run --evaluate``: the numbers of the training, at any ranks and under any strategy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import det_ds
from tests.package import checkpoints

TRIAL = """
import torch
from determined_ds import DataParallelTrial
from determined_ds.callbacks import EMA


class Trial(DataParallelTrial):
    def prepare(self):
        inputs = torch.randn(37, 3, generator=torch.Generator().manual_seed(1))
        self.data = torch.utils.data.TensorDataset(torch.arange(37), inputs, inputs.sum(1, keepdim=True))

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[1]), batch[2])

    def build_callbacks(self):
        return {"ema": EMA(0.9)}

    def build_training_data_loader(self):
        return self.training_loader(self.data)

    def build_validation_data_loader(self):
        return self.validation_loader(self.data)
"""
EXPERIMENT = {
    "name": "mine",
    "entrypoint": "python3 -m determined_ds.train trial:Trial",
    "resources": {"slots_per_trial": 2},
    "hyperparameters": {
        "global_batch_size": 8,
        "zero_stage": 1,
        "deepspeed_config": {
            "type": "const",
            "val": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}},
        },
        "fit": {"max_length": {"batches": 6}, "validation_period": {"batches": 3}},
    },
    "searcher": {"name": "single", "metric": "validation_loss"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "trial.py").write_text(TRIAL)
    (folder / "mine.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    assert run(folder).returncode == 0
    return folder


def run(folder: Path, *options: str | Path) -> Any:
    return det_ds("run", "mine.yaml", ".", "--run-dir", "run", *options, cwd=folder)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_evaluated_on_one_rank_under_zero_3_is_what_two_ranks_validated(trained: Path) -> None:
    """With the average of an EMA, which both have written in parts; the run stays as it is."""
    before = records(trained / "run")
    validated = [each for each in before if each["group"] == "validation"]
    done = run(trained, "--evaluate", "last", "--slots", "1", "--set", "hyperparameters.zero_stage=3")
    assert done.returncode == 0, done.stderr
    assert "validation  batch 6  validation_loss" in done.stdout
    (there,) = (trained / "run/evaluated").iterdir()
    (found,) = records(there)
    assert (found["group"], found["steps_completed"]) == ("validation", 6)
    now, then = found["metrics"]["validation_loss"], validated[-1]["metrics"]["validation_loss"]
    assert now == pytest.approx(then, rel=1e-5)
    result = json.loads((there / "result.json").read_text())
    assert (result["status"], result["steps_completed"], result["best"]["value"]) == ("completed", 6, now)
    assert records(trained / "run") == before
    assert len(list((trained / "run/checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        (("--evaluate", "OLDER"), 3),
        (("--evaluate", "run"), 6),
    ],
)
def test_a_checkpoint_is_named_by_its_uuid_or_its_path(
    given: tuple[str, ...], batch: int, trained: Path, tmp_path: Path
) -> None:
    """By its uuid alone, too, where the current folder has the run."""
    older = checkpoints(trained / "run")[1]
    shutil.copytree(trained, tmp_path / "there", symlinks=True)
    words = [word.replace("OLDER", older.name) for word in given]
    if words == ["--evaluate", older.name]:
        (tmp_path / "there/runs/mine").mkdir(parents=True)
        (tmp_path / "there/run").rename(tmp_path / "there/runs/mine/now")
    done = det_ds("run", "mine.yaml", ".", *words, "--slots", "1", cwd=tmp_path / "there")
    assert done.returncode == 0, done.stderr
    assert f"validation  batch {batch}  validation_loss" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--evaluate", "nowhere"), "there is no such checkpoint"),
        (("--evaluate", "best", "--test"), "together with --test"),
        (("--evaluate", "last", "--run-dir", "run", "--set", "entrypoint=python3 trial.py"), "runs trials"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    words: tuple[str, ...], said: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    done = CliRunner().invoke(main, ["run", "mine.yaml", ".", *words, "--accelerator", "cpu"])
    assert done.exit_code == EXIT_CONFIG, done.output
    assert said in done.stderr
    assert "fix:" in done.stderr


def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "there", symlinks=True)
    newest = checkpoints(tmp_path / "there/run")[0]
    (newest / "trial_state.json").write_text("{}")
    done = run(tmp_path / "there", "--evaluate", newest.name)
    assert done.returncode == EXIT_CONFIG
    assert "is damaged: trial_state.json has 2 bytes" in done.stderr
