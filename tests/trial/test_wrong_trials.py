"""A trial whose methods are wrong is stopped with one message; one that is right is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from determined.pytorch import MetricReducer, PyTorchCallback, Reducer

from tests.ranks import Ranks
from tests.trial.test_returned import (
    GLOBAL_BATCH_SIZE,
    Mine,
    Regression,
    assert_contains,
    error_of,
    trial_class,
)

HERE = "tests/trial/test_wrong_trials.py:"


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


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def loss_of(value: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """A trial whose ``loss`` returns what ``value`` makes of the right one."""

    def loss(self: Any, model: Any, batch: Any) -> Any:
        return value((model(batch[0]) - batch[1]).square())

    return {"loss": loss}


def own_backward(self: Any, model: Any, batch: Any) -> Any:
    loss = error_of(model(batch[0]))
    loss.backward()
    return loss


def without_super(self: Any, context: Any) -> None:
    self.context = context


def loss_without_model(self: Any, batch: Any) -> Any: ...


def evaluate_with_index(self: Any, model: Any, batch: Any, batch_idx: int) -> Any: ...


def training_on(data: Any, **options: Any) -> dict[str, Any]:
    return {"build_training_data_loader": lambda self: self.training_loader(data, **options)}


def evaluated_to(value: Any) -> dict[str, Any]:
    return {"evaluate_full_dataset": returning({"validation_loss": value})}


def two_batches(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    next(batches)
    return type(self).__mro__[1].train_batch(self, batches, epoch_idx, batch_idx)


def no_step(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    return self.loss(self.engine, next(batches))


def reducer_of(value: Any) -> dict[str, Any]:
    def prepare(self: Any) -> None:
        self.context.wrap_reducer(lambda values: value, name="mine", for_training=False)

    return {"prepare": prepare}


def misspelt_reducer(self: Any) -> Any:
    return {"validation_los": Reducer.AVG}


class Locked(PyTorchCallback):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def state_dict(self) -> Any:
        return {"lock": [self.lock]}


class Counting(MetricReducer):
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def reset(self) -> None: ...
    def per_slot_reduce(self) -> Any: ...
    def cross_slot_reduce(self, per_slot_metrics: Any) -> Any: ...


def locked_reducer(self: Any) -> None:
    self.context.wrap_reducer(Counting(), name="count")


def wired(kind: str, method: str, words: str, value: Any = None) -> tuple[str, dict[str, Any], list[str]]:
    """That a method's value is checked at all: it returns what it never may."""
    return kind, {method: returning(value)}, [f".{method} ({HERE}", words]


# What is wrong -> kind of trial, methods, what is said.
WRONG: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a model": wired("", "build_model", "TrialError: MyTrial"),
    "models": wired("engines", "build_models", "TrialError: MyEngines"),
    "layers": wired("pipeline", "build_layers", "TrialError: MyPipeline"),
    "an optimizer": wired("", "build_optimizer", "a Mine", Mine()),
    "parameters": wired("", "build_parameters", "returned None"),
    "callbacks": wired("", "build_callbacks", "returned None"),
    "training data": wired("", "build_training_data_loader", "return self.training_loader(dataset)"),
    "a dataset": wired("", "build_validation_data_loader", "a Regression", Regression()),
    "tokens": wired("", "tokens_per_sample", "the str '128'", "128"),
    "a reducer": wired("", "evaluation_reducer", "the str 'avg'", "avg"),
    "a loss": wired("", "loss", "TrainingError: MyTrial"),
    "a loss in a pipeline": wired("pipeline", "loss", "TrainingError: MyPipeline"),
    "metrics of training": (
        "engines",
        {"train_batch": lambda self, batches, *_: [next(batches)]},
        ["MyEngines.train_batch", "a list of 1", "a dict of metrics"],
    ),
    "metrics of a batch": wired("", "evaluate", "returned None"),
    "metrics of a call": wired("", "evaluate_batch", "took no batch", {"loss": 1.0}),
    "metrics of all": wired("", "evaluate_full_dataset", "returned None"),
    "a length": wired("", "get_batch_length", "returned None"),
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
    "two batches": (
        "",
        {"train_batch": two_batches},
        ["MyTrial.train_batch", "took 2 batches", "one micro-batch"],
    ),
    "no batch": ("", {"train_batch": returning({"loss": 1.0})}, ["took no batch", "next(dataloader_iter)"]),
    "no step": ("", {"train_batch": no_step}, ["trained nothing", "engine.step()"]),
    "its own backward": ("", {"loss": own_backward}, ["MyTrial.loss", "whose backward() has been called"]),
    "its own batch size": (
        "",
        training_on(Regression(), batch_size=4),
        ["self.training_loader: got batch_size=4", "the micro-batch size, 8", "leave batch_size out"],
    ),
    "no data": (
        "",
        training_on(None),
        ["self.training_loader: got None", "__getitem__ and __len__", "returns an iterator"],
    ),
    "a class for data": ("", training_on(int), ["self.training_loader: got the class int"]),
    "samples of several shapes": (
        "",
        training_on([torch.zeros(1 + index % 2) for index in range(16)]),
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
    "a set as a metric": (
        "",
        evaluated_to({1.0}),
        ["MyTrial.evaluate_full_dataset", "metric 'validation_loss' is a set of 1 (float)"],
    ),
    "a searched list": (
        "",
        evaluated_to([1.0, 2.0]),
        [
            "searcher.metric = 'validation_loss'",
            "a list of 2 (float, float)",
            "fix: name a metric that is a number",
        ],
    ),
    "a reducer misspelt": (
        "",
        {"evaluation_reducer": misspelt_reducer},
        ["MyTrial.evaluation_reducer", "'validation_los'", "use: validation_loss"],
    ),
    "a reducer of a dict": ("", reducer_of({"iou": 1.0}), ["name set", "returned a dict"]),
    "a reducer of nothing": ("", reducer_of(None), ["metric 'mine' is None", "reducer <lambda>"]),
    "a reducer of an object": ("", reducer_of([Mine()]), ["holds a Mine", "fix: return numbers"]),
    "a lock in a callback": (
        "",
        {"build_callbacks": lambda self: {"mine": Locked()}},
        ["callback 'mine': Locked.state_dict", "its state['lock'][0] is a lock", "fix: leave it out"],
    ),
    "a lock in a reducer": (
        "",
        {"prepare": locked_reducer},
        ["Counting", "the attribute 'guard'", "an attribute of the class"],
    ),
}


def said_of_wrong(name: str) -> str:
    kind, methods, _ = WRONG[name]
    return said_of(kind, methods)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(one_rank: Ranks, name: str) -> None:
    [said] = one_rank.run(said_of_wrong, name)
    assert_contains(said, WRONG[name][2])


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "as it should be": ("", {}),
    "several engines": ("engines", {}),
    "layers from a generator": (
        "pipeline",
        {"build_layers": lambda self: (torch.nn.Linear(4, size) for size in (4, 1))},
    ),
    "metrics beside the loss, None at times; parameters from a generator": (
        "",
        {
            **loss_of(lambda errors: {"loss": errors.mean(), "rare": None, "bias": errors.sum().detach()}),
            "evaluate": returning({"validation_loss": 1.0}),
            "build_parameters": lambda self, model: model.parameters(),
        },
    ),
    "an optimizer, and a loss of one element": (
        "",
        {
            **loss_of(lambda errors: errors.mean().reshape(1)),
            "build_optimizer": lambda self, model: torch.optim.AdamW(model.parameters(), lr=0.1),
        },
    ),
}


def said_of_right(name: str) -> str:
    return said_of(*RIGHT[name])


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_left_alone(one_rank: Ranks, name: str) -> None:
    assert one_rank.run(said_of_right, name) == [""]


def misspelt_hook() -> list[str]:
    """The warnings of a callback with a method that is named as a hook."""
    import logging

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
    assert_contains(said, ["Misspelt.on_train_start", HERE, "did you mean on_training_start?"])
