"""What a trial's methods return or do wrongly: one message with the method, its place, what came and what to write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

HERE = "tests/trial/test_returned.py:"
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


def said_of(kind: str, methods: dict[str, Any], **more: Any) -> str:
    """In a rank: what is said of a trial, after two batches, a validation and a checkpoint; "" of one that trains."""
    import tempfile

    from determined.pytorch import Batch

    from determined_ds import DeterminedDSError, Trainer, open_context

    hparams = {
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "deepspeed_config": {
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        },
        **more,
    }
    exp_conf = {"searcher": {"name": "single", "metric": "validation_loss"}}
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            with open_context(
                hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu"
            ) as context:
                trial = trial_class(kind, **methods)(context)
                Trainer(trial, context).fit(max_length=Batch(2), reporting_period=Batch(1))
        except DeterminedDSError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def contains(said: str, words: list[str]) -> bool:
    missing = [word for word in words if word not in said]
    assert not missing, said
    return True


class Mine:
    """A stand-in for what no model should return."""


def module_class(*_: Any) -> Any:
    return torch.nn.Linear


def nothing(*_: Any) -> None:
    """A method whose return statement was forgotten."""


def a_class_among_layers(self: Any) -> Any:
    return [torch.nn.Linear, torch.nn.Linear(4, 1)]


def another_models_optimizer(self: Any, model: Any) -> Any:
    return torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)


def an_optimizer_class(self: Any, model: Any) -> Any:
    return torch.optim.SGD


def a_frozen_model(self: Any) -> Any:
    return torch.nn.Linear(4, 1).requires_grad_(False)


def named_parameters(self: Any, model: Any) -> Any:
    return model.named_parameters()


def the_dataset(self: Any) -> Any:
    return Regression()


def callback_classes() -> dict[str, Any]:
    from determined.pytorch import PyTorchCallback

    class Locked(PyTorchCallback):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def state_dict(self) -> Any:
            return {"lock": [self.lock]}

    return {"plain": PyTorchCallback, "locked": Locked}


def callback_list(self: Any) -> Any:
    return [callback_classes()["plain"]()]


def callback_class(self: Any) -> Any:
    return {"mine": callback_classes()["plain"]}


def locked_callback(self: Any) -> Any:
    return {"mine": callback_classes()["locked"]()}


def locked_reducer(self: Any) -> None:
    from determined.pytorch import MetricReducer

    class Counting(MetricReducer):
        def __init__(self) -> None:
            self.guard = threading.Lock()

        def reset(self) -> None: ...
        def per_slot_reduce(self) -> Any: ...
        def cross_slot_reduce(self, per_slot_metrics: Any) -> Any: ...

    self.context.wrap_reducer(Counting(), name="count")


def loss_of(value: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """A trial whose ``loss`` returns what ``value`` makes of the right one."""

    def loss(self: Any, model: Any, batch: Any) -> Any:
        return value((model(batch[0]) - batch[1]).square())

    return {"loss": loss}


def pipeline_loss_of(value: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    def loss(self: Any, outputs: Any, targets: Any) -> Any:
        return value((outputs - targets).square())

    return {"loss": loss}


def own_backward(self: Any, model: Any, batch: Any) -> Any:
    loss = error_of(model(batch[0]))
    loss.backward()
    return loss


def without_super(self: Any, context: Any) -> None:
    self.context = context


def loss_without_model(self: Any, batch: Any) -> Any: ...


def evaluate_with_index(self: Any, model: Any, batch: Any, batch_idx: int) -> Any: ...


def own_batch_size(self: Any) -> Any:
    return self.training_loader(Regression(), batch_size=4)


def uneven_samples(self: Any) -> Any:
    return self.training_loader([torch.zeros(1 + index % 2) for index in range(16)])


def two_batches(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    next(batches)
    return type(self).__mro__[1].train_batch(self, batches, epoch_idx, batch_idx)


def no_batch(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    return {"loss": 1.0}


def no_step(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    return self.loss(self.engine, next(batches))


def reducer_of(value: Any) -> Callable[[Any], None]:
    def prepare(self: Any) -> None:
        self.context.wrap_reducer(lambda values: value, name="mine", for_training=False)

    return prepare


def misspelt_reducer(self: Any) -> Any:
    from determined.pytorch import Reducer

    return {"validation_los": Reducer.AVG}


BUILT: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    # What is wrong -> kind of trial, methods, what is said.
    "a model forgotten": (
        "",
        {"build_model": nothing},
        ["MyTrial.build_model", "returned None", "Module", "missing return"],
    ),
    "a model's class": (
        "",
        {"build_model": module_class},
        ["the class Linear", "call it: return Linear(...)"],
    ),
    "a model that is none": (
        "",
        {"build_model": lambda self: Mine()},
        ["returned a Mine", "torch.nn.Module"],
    ),
    "a frozen model": ("", {"build_model": a_frozen_model}, ["returned no parameter", "requires_grad"]),
    "models forgotten": ("engines", {"build_models": nothing}, ["MyEngines.build_models", "None", "dict"]),
    "models in a list": (
        "engines",
        {"build_models": lambda self: [torch.nn.Linear(4, 1)]},
        ["list of 1 (Linear)"],
    ),
    "a model is none": ("engines", {"build_models": lambda self: {"one": None}}, ["'one': None"]),
    "an optimizer's class": (
        "",
        {"build_optimizer": an_optimizer_class},
        ["the class SGD", "return SGD(self."],
    ),
    "another model's optimizer": (
        "",
        {"build_optimizer": another_models_optimizer},
        ["no parameter of the model", "nothing would be trained"],
    ),
    "parameters forgotten": ("", {"build_parameters": nothing}, ["MyTrial.build_parameters", "None", "list"]),
    "pairs": (
        "",
        {"build_parameters": named_parameters},
        ["a tuple of 2 (str, Parameter)", "named_parameters"],
    ),
    "training data forgotten": (
        "",
        {"build_training_data_loader": nothing},
        ["MyTrial.build_training_data_loader", "None", "return self.training_loader(dataset)"],
    ),
    "a dataset": (
        "",
        {"build_validation_data_loader": the_dataset},
        ["a Regression", "return self.validation_loader(dataset)"],
    ),
    "callbacks forgotten": ("", {"build_callbacks": nothing}, ["MyTrial.build_callbacks", "None", "dict"]),
    "callbacks in a list": (
        "",
        {"build_callbacks": callback_list},
        ["a list of 1 (PyTorchCallback)", "dict"],
    ),
    "a callback's class": (
        "",
        {"build_callbacks": callback_class},
        ["the class PyTorchCallback", "'mine': PyTorchCallback()"],
    ),
    "no engine": (
        "",
        {"__init__": without_super},
        ["MyTrial.__init__", "wrapped no engine", "super().__init__"],
    ),
    "other arguments": (
        "",
        {"loss": loss_without_model, "evaluate": evaluate_with_index},
        [
            "MyTrial.loss",
            "def loss(self, model, batch)",
            "MyTrial.evaluate",
            "def evaluate(self, model, batch)",
        ],
    ),
    "tokens as text": ("", {"tokens_per_sample": lambda self: "128"}, ["tokens_per_sample", "the str '128'"]),
    "a reducer as text": ("", {"evaluation_reducer": lambda self: "avg"}, ["the str 'avg'", "Reducer.AVG"]),
}


def built(name: str) -> str:
    kind, methods, _ = BUILT[name]
    return said_of(kind, methods)


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_wrongly_is_refused_before_training(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(built, name)
    assert said.startswith("TrialError: My")
    assert contains(said, [HERE, "fix: ", *BUILT[name][2]])


LOSSES: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "nothing": (nothing, ["returned None", "missing return"]),
    "a float": (lambda errors: errors.mean().item(), ["returned the float", "without .item()"]),
    "a vector": (lambda errors: errors, ["a tensor of shape (8, 1)", "loss.mean()"]),
    "a tuple": (lambda errors: (errors.mean(), errors), ["a tuple of 2 (Tensor, Tensor)"]),
    "detached": (
        lambda errors: errors.mean().detach(),
        ["a scalar tensor that requires no gradient", "detach"],
    ),
    "whole numbers": (lambda errors: errors.sum().long(), ["a scalar tensor of torch.int64 that requires"]),
}
DICTS: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "no loss": (lambda errors: {"mse": errors.mean()}, ["a dict of 'mse'", 'return {"loss": loss, ...}']),
    "a vector in a dict": (
        lambda errors: {"loss": errors},
        ["a dict whose 'loss' is a tensor of shape (8, 1)"],
    ),
}


def lost(name: str) -> str:
    return said_of("", loss_of({**LOSSES, **DICTS}[name][0]))


@pytest.mark.parametrize("name", [*LOSSES, *DICTS])
def test_a_loss_that_cannot_be_descended_is_refused(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(lost, name)
    assert said.startswith(f"TrainingError: MyTrial.loss ({HERE}")
    assert contains(said, ["a scalar tensor that requires a gradient", *{**LOSSES, **DICTS}[name][1]])


def lost_in_pipeline(name: str) -> str:
    return said_of("pipeline", pipeline_loss_of(LOSSES[name][0]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_pipelines_loss_is_looked_at_where_it_is_computed(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(lost_in_pipeline, name)
    assert said.startswith(f"TrainingError: MyPipeline.loss ({HERE}")
    assert contains(said, LOSSES[name][1])


DONE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "training metrics in a list": (
        "engines",
        {"train_batch": lambda self, batches, *_: [next(batches)]},
        ["MyEngines.train_batch", "a list of 1", "a dict of metrics"],
    ),
    "a metric of no name": (
        "engines",
        {"train_batch": lambda self, batches, *_: {1: next(batches)}},
        ["the key 1", "write '1'"],
    ),
    "two batches": (
        "",
        {"train_batch": two_batches},
        ["MyTrial.train_batch", "took 2 batches", "one micro-batch"],
    ),
    "no batch": ("", {"train_batch": no_batch}, ["took no batch", "next(dataloader_iter)"]),
    "no step": ("", {"train_batch": no_step}, ["trained nothing", "engine.step()"]),
    "its own backward": ("", {"loss": own_backward}, ["MyTrial.loss", "whose backward() has been called"]),
    "its own batch size": (
        "",
        {"build_training_data_loader": own_batch_size},
        ["self.training_loader: got batch_size=4", "the micro-batch size, 8", "leave batch_size out"],
    ),
    "no data": (
        "",
        {"build_training_data_loader": lambda self: self.training_loader(None)},
        ["self.training_loader: got None", "__getitem__ and __len__", "returns an iterator"],
    ),
    "a class for data": (
        "",
        {"build_training_data_loader": lambda self: self.training_loader(int)},
        ["self.training_loader: got the class int"],
    ),
    "samples of several shapes": (
        "",
        {"build_training_data_loader": uneven_samples},
        ["MyTrial.build_training_data_loader", "do not make a batch", "equal size", "collate_fn"],
    ),
    "text as a metric": (
        "",
        loss_of(lambda errors: {"loss": errors.mean(), "note": "fine"}),
        ["MyTrial.loss", "metric 'note' is the str 'fine'"],
    ),
    "outputs as a metric": (
        "",
        loss_of(lambda errors: {"loss": errors.mean(), "logits": torch.zeros(8, 50_000)}),
        ["MyTrial.loss", "metric 'logits' is 400,000 numbers of shape (8, 50000)", "leave it out"],
    ),
    "an evaluation forgotten": ("", {"evaluate": nothing}, ["MyTrial.evaluate ", "returned None", "a dict"]),
    "an evaluated list": ("", {"evaluate": lambda *_: [1.0]}, ["MyTrial.evaluate ", "a list of 1 (float)"]),
    "all evaluated to nothing": (
        "",
        {"evaluate_full_dataset": nothing},
        ["MyTrial.evaluate_full_dataset", "returned None"],
    ),
    "a set of them": (
        "",
        {"evaluate_full_dataset": lambda self, data_loader: {"validation_loss": {1.0}}},
        ["MyTrial.evaluate_full_dataset", "metric 'validation_loss' is a set of 1 (float)"],
    ),
    "no length": (
        "",
        {"get_batch_length": nothing},
        ["MyTrial.get_batch_length", "returned None", "integer"],
    ),
    "a reducer misspelt": (
        "",
        {"evaluation_reducer": misspelt_reducer},
        ["MyTrial.evaluation_reducer", "'validation_los'", "use: validation_loss"],
    ),
    "a reducer of a dict": ("", {"prepare": reducer_of({"iou": 1.0})}, ["name set", "returned a dict"]),
    "a reducer of nothing": (
        "",
        {"prepare": reducer_of(None)},
        ["metric 'mine' is None", "reducer <lambda>"],
    ),
    "a reducer of an object": (
        "",
        {"prepare": reducer_of([Mine()])},
        ["holds a Mine", "fix: return numbers"],
    ),
    "a searched list": (
        "",
        {"evaluate_full_dataset": lambda self, data_loader: {"validation_loss": [1.0, 2.0]}},
        [
            "searcher.metric = 'validation_loss'",
            "a list of 2 (float, float)",
            "fix: name a metric that is a number",
        ],
    ),
    "a lock in a callback": (
        "",
        {"build_callbacks": locked_callback},
        ["callback 'mine': Locked.state_dict", "its state['lock'][0] is a lock", "fix: leave it out"],
    ),
    "a lock in a reducer": (
        "",
        {"prepare": locked_reducer},
        ["Counting", "the attribute 'guard'", "an attribute of the class"],
    ),
}


def done(name: str) -> str:
    kind, methods, _ = DONE[name]
    return said_of(kind, methods)


@pytest.mark.parametrize("name", DONE)
def test_what_is_done_wrongly_in_training_is_said(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(done, name)
    assert contains(said, DONE[name][2])


LAYERS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "forgotten": (nothing, ["returned None", "a list of layers"]),
    "a class": (a_class_among_layers, ["the class Linear as layer 0", "LayerSpec(Linear, ...)"]),
    "a number": (lambda self: [torch.nn.Linear(4, 1), 3], ["the int 3 as layer 1"]),
    "a model": (lambda self: torch.nn.Linear(4, 1), ["returned a Linear", "one after the other"]),
}


def layered(name: str) -> str:
    return said_of("pipeline", {"build_layers": LAYERS[name][0]})


@pytest.mark.parametrize("name", LAYERS)
def test_what_are_no_layers_is_refused(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(layered, name)
    assert said.startswith(f"TrialError: MyPipeline.build_layers ({HERE}")
    assert contains(said, LAYERS[name][1])


def too_few_layers() -> str:
    return said_of("pipeline", {"build_layers": lambda self: [torch.nn.Linear(4, 1)]}, pipe_parallel_size=2)


def test_there_is_a_layer_for_every_stage(two_ranks: Ranks) -> None:
    for said in two_ranks.run(too_few_layers):
        assert contains(said, ["returned 1 layer, and pipe_parallel_size is 2", "at most 1"])


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "as it should be": ("", {}),
    "several engines": ("engines", {}),
    "layers from a generator": (
        "pipeline",
        {"build_layers": lambda self: (torch.nn.Linear(4, size) for size in (4, 1))},
    ),
    "metrics beside the loss, None at times": (
        "",
        {
            **loss_of(lambda errors: {"loss": errors.mean(), "rare": None, "bias": errors.sum().detach()}),
            "evaluate": lambda self, model, batch: {"validation_loss": 1.0},
        },
    ),
    "parameters from a generator": ("", {"build_parameters": lambda self, model: model.parameters()}),
    "an optimizer": (
        "",
        {"build_optimizer": lambda self, model: torch.optim.AdamW(model.parameters(), lr=0.1)},
    ),
    "a loss of one element": ("", loss_of(lambda errors: errors.mean().reshape(1))),
}


def right(name: str) -> str:
    return said_of(*RIGHT[name])


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_left_alone(one_rank: Ranks, name: str) -> None:
    assert one_rank.run(right, name) == [""]


def misspelt_hook() -> list[str]:
    """The warnings of a callback with a method that is named as a hook."""
    import logging

    from determined.pytorch import PyTorchCallback

    class Misspelt(PyTorchCallback):
        def on_train_start(self) -> None: ...

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("determined_ds").addHandler(handler)
    try:
        assert said_of("", {"build_callbacks": lambda self: {"mine": Misspelt()}}) == ""
    finally:
        logging.getLogger("determined_ds").removeHandler(handler)
    return said


def test_a_hook_that_is_never_called_is_named(one_rank: Ranks) -> None:
    [[said]] = one_rank.run(misspelt_hook)
    assert contains(said, ["Misspelt.on_train_start", HERE, "did you mean on_training_start?"])
