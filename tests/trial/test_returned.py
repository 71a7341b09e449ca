"""What is said of a value that a trial's method should not return: the method, its place, what came, what to write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined.pytorch import PyTorchCallback

from determined_ds.errors import TrainingError, TrialError

GLOBAL_BATCH_SIZE = 8


class Regression(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2 * GLOBAL_BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        numbers = torch.full((4,), index / 10)
        return numbers, numbers[:1]


def error_of(loss: torch.Tensor) -> torch.Tensor:
    return loss.square().mean()


def trial_class(kind: str, **methods: Any) -> Any:
    """A trial that is right but for the methods given; made where deepspeed is loaded: in a rank."""
    from determined_ds import DataParallelTrial, PipelineTrial
    from determined_ds.trial.several_engines import SeveralEnginesTrial

    class Data:
        training_loader: Any
        validation_loader: Any

        def build_training_data_loader(self) -> Any:
            return self.training_loader(Regression())

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(Regression())

    class MyTrial(Data, DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Linear(4, 1)

        def loss(self, model: Any, batch: Any) -> Any:
            return error_of(model(batch[0]) - batch[1])

    class MyPipeline(Data, PipelineTrial):
        def build_layers(self) -> Any:
            return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]

        def loss(self, outputs: Any, targets: Any) -> Any:
            return error_of(outputs - targets)

    class MyEngines(Data, SeveralEnginesTrial):
        def build_models(self) -> Any:
            return {"one": torch.nn.Linear(4, 1)}

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            batch = next(dataloader_iter)
            loss = error_of(self.engine(batch[0]) - batch[1])
            self.engine.backward(loss)
            self.engine.step()
            return loss

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            return {"validation_loss": error_of(self.engine(next(dataloader_iter)[0]))}

    base: Any = {"pipeline": MyPipeline, "engines": MyEngines}.get(kind, MyTrial)
    return type(base.__name__, (base,), methods)


def assert_contains(said: str, words: list[str]) -> None:
    missing = [word for word in words if word not in said]
    assert not missing, said


class Mine:
    """A stand-in for what no method should return."""


def linear() -> Any:
    return torch.nn.Linear(4, 1)


def loss(value: Callable[[torch.Tensor], Any]) -> Any:
    """What an author makes of the errors of a batch."""
    return value(torch.ones(8, 1, requires_grad=True).square())


# Check -> values that a method may return, and what is said of them.
VALUES: dict[str, list[tuple[Any, list[str]]]] = {
    "model": [
        (None, ["MyTrial.build_model", "returned None", "a torch.nn.Module", "missing return"]),
        (torch.nn.Linear, ["the class Linear", "call it: return Linear(...)"]),
    ],
    "models": [
        (None, ["MyEngines.build_models", "returned None", "a dict", "missing return"]),
        ([linear()], ["list of 1 (Linear)"]),
        ({"one": None}, ["'one': None"]),
    ],
    "layers": [
        (None, ["MyPipeline.build_layers", "returned None", "a list of layers", "missing return"]),
        ([torch.nn.Linear, linear()], ["the class Linear as layer 0", "LayerSpec(Linear, ...)"]),
        ([linear(), 3], ["the int 3 as layer 1"]),
        (linear(), ["returned a Linear", "one after the other"]),
        ([linear()], ["returned 1 layer, and pipe_parallel_size is 2", "at most 1"]),
    ],
    "optimizer": [
        (torch.optim.SGD, ["MyTrial.build_optimizer", "the class SGD", "return SGD(self."]),
        (
            torch.optim.SGD(linear().parameters(), lr=1),
            ["no parameter of the model", "nothing would be trained"],
        ),
    ],
    "parameters": [
        (None, ["MyTrial.build_parameters", "returned None", "a list", "missing return"]),
        (linear().named_parameters(), ["a tuple of 2 (str, Parameter)", "named_parameters"]),
        ([], ["MyTrial.build_model", "returned no parameter", "requires_grad"]),
    ],
    "callbacks": [
        (None, ["MyTrial.build_callbacks", "returned None", "a dict", "missing return"]),
        ([Mine()], ["a list of 1 (Mine)", "a dict"]),
        ({"mine": PyTorchCallback}, ["the class PyTorchCallback", "'mine': PyTorchCallback()"]),
    ],
    "tokens_per_sample": [("128", ["MyTrial.tokens_per_sample", "the str '128'"])],
    "evaluation_reducer": [("avg", ["MyTrial.evaluation_reducer", "the str 'avg'", "Reducer.AVG"])],
    "training_loss": [
        (None, ["MyTrial.loss", "returned None", "missing return"]),
        (loss(lambda errors: errors.mean().item()), ["returned the float", "without .item()"]),
        (loss(lambda errors: errors), ["a tensor of shape (8, 1)", "loss.mean()"]),
        (loss(lambda errors: (errors.mean(), errors)), ["a tuple of 2 (Tensor, Tensor)"]),
        (
            loss(lambda errors: errors.mean().detach()),
            ["a scalar tensor that requires no gradient", "detach"],
        ),
        (loss(lambda errors: errors.sum().long()), ["a scalar tensor of torch.int64 that requires"]),
        ({"mse": 1.0}, ["a dict of 'mse'", 'return {"loss": loss, ...}']),
        ({"loss": loss(lambda errors: errors)}, ["a dict whose 'loss' is a tensor of shape (8, 1)"]),
    ],
    "pipeline_loss": [
        (None, ["MyPipeline.loss", "returned None", "a scalar tensor that requires a gradient"]),
        (loss(lambda errors: errors), ["a tensor of shape (8, 1)", "loss.mean()"]),
        (loss(lambda errors: errors.mean().detach()), ["a scalar tensor that requires no gradient"]),
        ({"loss": 1.0}, ["a dict of 'loss'", "return the loss alone"]),
    ],
    "metrics": [
        ([1], ["MyEngines.train_batch", "a list of 1", "a dict of metrics"]),
        ({1: 2.0}, ["the key 1", "write '1'"]),
    ],
    "batch_length": [(None, ["MyTrial.get_batch_length", "returned None", "an integer"])],
}
KINDS = {"models": "engines", "metrics": "engines", "layers": "pipeline", "pipeline_loss": "pipeline"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"metrics": ("train_batch",)}


@pytest.mark.parametrize(("check", "values"), VALUES.items(), ids=VALUES)
def test_a_value_that_is_wrong_is_described_with_what_is_expected(
    check: str, values: list[tuple[Any, list[str]]]
) -> None:
    from determined_ds.trial import returned

    cls = trial_class(KINDS.get(check, ""))
    trial = object.__new__(cls)  # no engine is made
    trial.context = SimpleNamespace(distributed=SimpleNamespace(rank=0))
    for value, words in values:
        given = {"optimizer": (linear(), value), "layers": (value, 2)}.get(check, (value,))
        with pytest.raises((TrialError, TrainingError)) as raised:
            getattr(returned, check)(trial, *given, *ARGUMENTS.get(check, ()))
        assert_contains(str(raised.value), ["fix: ", *words])


def test_a_schedule_of_several_parts_a_stage_needs_a_layer_for_each() -> None:
    from determined_ds.trial import returned

    trial = object.__new__(trial_class("pipeline"))
    with pytest.raises(TrialError) as raised:
        returned.layers(trial, [linear()] * 3, 2, chunks=2)
    words = ["returned 3 layers, and pipe_parallel_size is 2 with pipe_chunks 2", "each part of each stage"]
    assert_contains(str(raised.value), [*words, "pipe_parallel_size to at most 1", "such as 1f1b"])
    assert len(returned.layers(trial, [linear()] * 4, 2, chunks=2)) == 4
