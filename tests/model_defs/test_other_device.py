"""Every model's loss in bf16 on a device that is not the CPU: torch's meta device, which holds no numbers.

It refuses what a GPU would refuse, a tensor that was left on the CPU, and what a GPU would wait for: a number that is
read of a tensor, a shape that depends on one. (``causal_lm`` makes no masks there: transformers reads a number in each
forward pass to learn whether documents are packed, on a GPU too.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from determined_ds import PipelineTrial
from determined_ds.experiment.experiment import load_experiment
from determined_ds.runtime.shapes.bare_trial import bare_trial, chain_of, inside, trial_class
from determined_ds.runtime.shapes.counting import quietly
from tests.making import resolved_of
from tests.ranks import ROOT

WHOLE = (
    "bert/const",
    "causal_lm/const",
    "drivable_vit/const",
    "gpt2/const",
    "gpt2/pipeline",
    "vit/const",
)


class Engine(nn.Module):
    """As DeepSpeed's in bf16: it casts what a model is given, and steps."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module.to("meta", torch.bfloat16).train()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        cast = [_half(value) for value in inputs]
        return self.module(*cast, **{name: _half(value) for name, value in named.items()})

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.zero_grad()


def _half(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.bfloat16() if is_float else value


def trial_of(template: str) -> Any:
    """A template's trial without an engine, on the meta device."""
    experiment = load_experiment(ROOT / "experiments" / f"{template}.yaml")
    resolved = resolved_of(experiment)
    assert resolved.ds_config["bf16"]["enabled"] is True
    trial = bare_trial(trial_class(experiment), experiment, resolved, "meta")
    trial.prepare()
    return trial


@pytest.mark.parametrize("template", WHOLE)
def test_a_model_descends_its_loss_there(template: str) -> None:
    with inside(ROOT), quietly():
        trial = trial_of(template)
        in_stages = isinstance(trial, PipelineTrial)
        with torch.device("meta"):
            model = chain_of(trial.build_layers()) if in_stages else trial.build_model()
        engine = Engine(model)
        batch = trial.context.to_device(next(iter(trial.build_training_data_loader().get_data_loader())))
        loss = trial.loss(engine(batch[0]), batch[1]) if in_stages else trial.loss(engine, batch)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        loss.backward()
    assert (loss.device.type, loss.shape, loss.dtype) == ("meta", (), torch.float32)
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    assert len(trained) > 5
    assert {parameter.grad.device.type for parameter in trained if parameter.grad is not None} == {"meta"}


def test_two_models_step_against_each_other_there() -> None:
    with inside(ROOT), quietly():
        trial = trial_of("dcgan/const")
        with torch.device("meta"):
            trial.engines = {name: Engine(model) for name, model in trial.build_models().items()}
        batches = iter(trial.build_training_data_loader().get_data_loader())
        metrics = trial.train_batch(batches, 0, 0)
    assert set(metrics) == {"loss", "d_loss", "g_loss"}
    assert {(value.device.type, value.dtype) for value in metrics.values()} == {("meta", torch.float32)}


def test_what_is_left_on_the_cpu_is_refused_there() -> None:
    """So the device tells."""
    with pytest.raises(RuntimeError, match="meta"):
        Engine(nn.Linear(2, 2))(torch.ones(1, 2)).sum().item()
