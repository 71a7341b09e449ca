"""What the pages tell an author to write in a trial is taken by every command, not by ``run`` alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.own_runs import invoke
from tests.harness.command import det_ds

HEAD = """
import torch
from determined.pytorch import MetricReducer, PyTorchCallback
from trial import TinyTrial, samples

from determined_ds import PipelineTrial
from determined_ds.callbacks import EMA

"""
# Its trial, and what its experiment says: docs/your-model.md, docs/pipelines.md.
OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "its own optimizer, schedule, metrics and callbacks": (
        """
class Count(MetricReducer):
    def reset(self):
        self.samples = 0

    def update(self, samples):
        self.samples += samples

    def per_slot_reduce(self):
        return self.samples

    def cross_slot_reduce(self, per_slot_metrics):
        return sum(per_slot_metrics)


class Steps(PyTorchCallback):
    steps = 0

    def on_step_end(self, batch_idx, metrics):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


class T(TinyTrial):
    validation_metrics = {"validation_largest": "max"}

    def tokens_per_sample(self):
        return 4

    def get_batch_length(self, batch):
        return len(batch[0])

    def prepare(self):
        self.count = self.context.wrap_reducer(Count(), name="validation_count", for_training=False)

    def build_optimizer(self, model):
        return torch.optim.AdamW(self.build_parameters(model), lr=0.01)

    def build_parameters(self, model):
        return [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return {"loss": loss, "half": loss / 2}

    def evaluate(self, model, batch):
        self.count.update(len(batch[0]))
        loss = super().loss(model, batch)
        return {"validation_loss": loss, "validation_largest": loss}

    def build_callbacks(self):
        return {"steps": Steps(), "ema": EMA(0.9)}
""",
        {"overwrite_deepspeed_args": {"optimizer": None, "scheduler": None}},
    ),
    "a pipeline": (
        """
class T(PipelineTrial):
    partition_method = "uniform"

    def build_layers(self):
        return [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]

    def loss(self, outputs, targets):
        return torch.nn.functional.mse_loss(outputs, targets)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.total_steps)

    def build_training_data_loader(self):
        return self.training_loader(samples(64, seed=1))

    def build_validation_data_loader(self):
        return self.validation_loader(samples(10, seed=2))
""",
        {"pipe_parallel_size": 2, "pipe_schedule": "zb-h1", "micro_batch_size": 2},
    ),
}
DECIDING = ["check --strict", "check --explain", "check --memory"]


@pytest.fixture
def own(own_model: Path, request: pytest.FixtureRequest) -> Path:
    """A context directory with the trial of an option."""
    source, hyperparameters = OPTIONS[request.param]
    (own_model / "own.py").write_text(HEAD + source)
    config = yaml.safe_load((own_model / "experiment.yaml").read_text())
    config["entrypoint"] = "python3 -m determined_ds.train own:T"
    config["hyperparameters"] |= hyperparameters
    (own_model / "experiment.yaml").write_text(json.dumps(config))
    return own_model


@pytest.mark.parametrize("own", OPTIONS, indirect=True)
def test_what_decides_takes_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    for words in DECIDING:
        command, *options = words.split()
        done = invoke(command, Path(own.name), *options)
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "words",
    [
        "compare --slots 1 --strategies zero1 --steps 1 --warmup 0 --repeat 1",
        pytest.param("search", marks=pytest.mark.long("a trial is a run, which compare starts too")),
        pytest.param("autotune --budget 2 --steps 5 --warmup 0", marks=pytest.mark.long("as compare")),
    ],
)
@pytest.mark.parametrize("own", ["its own optimizer, schedule, metrics and callbacks"], indirect=True)
def test_what_starts_runs_takes_an_optimizer_of_the_trial(own: Path, words: str, tmp_path: Path) -> None:
    command, *options = words.split()
    done = det_ds(command, own / "experiment.yaml", own, "--run-dir", tmp_path / "run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout + done.stderr
