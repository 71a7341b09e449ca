"""``det-ds run --evaluate`` and ``--predict``: the numbers of the training, at any ranks and under any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from determined_ds import load_model_from_checkpoint_path, load_state_dict_from_checkpoint_path
from determined_ds.errors import CheckpointError, ConfigError, TrialError
from tests.command import det_ds

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

    def predict(self, model, batch):
        return {"index": batch[0], "output": model(batch[1]).squeeze(-1)}

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


def test_predictions_are_one_row_a_sample_in_the_order_of_the_data(trained: Path) -> None:
    """37 samples divide by neither the ranks nor the micro-batch."""
    for slots in ("1", "2"):
        done = run(trained, "--predict", f"{slots}.jsonl", "--checkpoint", "last", "--slots", slots)
        assert done.returncode == 0, done.stderr
        assert "predicted   37 samples" in done.stdout
    one, two = (
        [json.loads(line) for line in (trained / f"{slots}.jsonl").read_text().splitlines()] for slots in "12"
    )
    assert [row["index"] for row in one] == [row["index"] for row in two] == list(range(37))
    assert [row["output"] for row in one] == pytest.approx([row["output"] for row in two], rel=1e-5)


def test_the_average_is_had_in_python_too(trained: Path) -> None:
    """Of two ranks' parts; on the whole validation data it has the loss that was reported."""
    last = max((trained / "run/checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    validated = [each for each in records(trained / "run") if each["group"] == "validation"][-1]["metrics"]
    inputs = torch.randn(37, 3, generator=torch.Generator().manual_seed(1))
    losses = []
    for average in ("ema", None):
        model = load_model_from_checkpoint_path(last, context_dir=trained, average=average)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))))
    assert losses[0] == pytest.approx(validated["validation_loss"], rel=1e-5)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
    with pytest.raises(CheckpointError, match="no average of a callback 'other'; it has: ema"):
        load_state_dict_from_checkpoint_path(last, average="other")


def test_a_trial_without_predict_and_a_pipeline_are_refused() -> None:
    from determined_ds.runtime.loop.predicting import check_predicts

    alone = SimpleNamespace(topology=SimpleNamespace(sequence_parallel_size=1))
    with pytest.raises(TrialError, match="is not defined; expected a method predict"):
        check_predicts(object(), SimpleNamespace(use_pipeline_parallel=False, resolved=alone))
    with pytest.raises(ConfigError, match="stages of a pipeline"):
        check_predicts(object(), SimpleNamespace(use_pipeline_parallel=True))
