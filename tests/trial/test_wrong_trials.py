"""A trial that would train something else is stopped with one message; one that is right is left alone."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from determined.pytorch import PyTorchCallback, Reducer
from torch.optim import lr_scheduler

from tests.harness.ranks import Ranks
from tests.trial.regression import train, trial_class

HERE = "tests/trial/test_wrong_trials.py:"


def said_of(kind: str, methods: dict[str, Any], **more: Any) -> str:
    """In a rank: what is said of a trial, after two batches, a validation and a checkpoint; "" of one that trains."""
    from determined_ds import DeterminedDSError

    hparams = {
        "learning_rate": 0.01,
        "deepspeed_config": {
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        },
        **more,
    }
    exp_conf = {"searcher": {"name": "single", "metric": "validation_loss"}}
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            train(Path(run_dir), trial_class(kind, **methods), hparams, steps=2, exp_conf=exp_conf)
        except DeterminedDSError as error:
            return f"{type(error).__name__}: {error}"
    return ""


class Locked(PyTorchCallback):
    def state_dict(self) -> Any:
        return {"lock": [threading.Lock()]}


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def loss_of(value: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Returns what ``value`` makes of the squared errors of a batch."""
    return lambda self, model, batch: value((model(batch[0]) - batch[1]).square())


def named(errors: torch.Tensor) -> dict[str, Any]:
    return {"loss": errors.mean(), "rare": None, "bias": errors.sum().detach()}


def of_another(self: Any, optimizer: Any) -> Any:
    return lr_scheduler.StepLR(torch.optim.AdamW(torch.nn.Linear(4, 1).parameters()), 2)


def two_batches(self: Any, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
    next(batches)
    return type(self).__mro__[1].train_batch(self, batches, epoch_idx, batch_idx)


STEP = {"build_scheduler": lambda self, optimizer: lr_scheduler.StepLR(optimizer, 2)}
PLATEAU = {"build_scheduler": lambda self, optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)}
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
UNFROZEN = {  # by torch's own optimizer, which has no group for it
    "build_model": lambda self: torch.nn.Sequential(torch.nn.Linear(4, 1)),
    "build_optimizer": lambda self, model: torch.optim.SGD(
        [model[0].bias.requires_grad_(False), model[0].weight][1:]
    ),
    "on_step_end": lambda self, *_: self.engine.module[-1].bias.requires_grad_(True),
}


class Case(NamedTuple):
    """A trial of a kind, with methods in place of a regression's; ``words`` are said of it, "" where it trains."""

    words: str
    methods: dict[str, Any]
    kind: str = ""
    over: dict[str, Any] = {}  # noqa: RUF012 — of the DeepSpeed JSON


WRONG: list[tuple[Any, ...]] = [
    *(
        (f".{name} ({HERE}", {name: returning(None)})
        for name in ("build_scheduler", "build_callbacks", "loss")
    ),
    (f".build_models ({HERE}", {"build_models": returning(None)}, "engines"),
    ("num_worker: is", {"build_training_data_loader": lambda each: each.training_loader([], num_worker=2)}),
    ("LayerSpec(Class, ...)", {"build_layers": returning([torch.nn.Linear])}, "pipeline"),
    ("wrapped no engine", {"__init__": lambda self, context: setattr(self, "context", context)}),
    ("nothing would be trained", {"build_optimizer": lambda *_: of_another(*_).optimizer}),
    ("the optimizer that it is given", {"build_scheduler": of_another}),
    ("steps at each optimizer step", PLATEAU),
    ("the JSON's schedule would not be", STEP, "", WARM_UP),
    ("took 2 batches", {"train_batch": two_batches}),
    ("next(dataloader_iter)", {"train_batch": returning({"loss": 1.0})}),
    ("engine.step()", {"train_batch": lambda self, batches, *_: self.loss(self.engine, next(batches))}),
    (
        "bias was frozen in training",
        {"on_step_end": lambda self, *_: self.engine.module[-1].bias.requires_grad_(False)},
    ),
    ("bias was unfrozen in training", UNFROZEN, "", {"zero_optimization": {"stage": 0}}),
    (".detach()", {"loss": loss_of(lambda errors: errors.mean().detach())}),
    ("no other metric", {"loss": lambda self, outputs, targets: named(outputs - targets)}, "pipeline"),
    ("took no batch", {"evaluate_batch": returning({"loss": 1.0})}),
    ("metric 'note' is the str 'fine'", {"loss": loss_of(lambda errors: {**named(errors), "note": "fine"})}),
    ("report a number by this name", {"evaluate_full_dataset": returning({"validation_loss": [1.0, 2.0]})}),
    ("use: validation_loss", {"evaluation_reducer": returning({"validation_los": Reducer.AVG})}),
    ("Locked.state_dict", {"build_callbacks": returning({"mine": Locked()})}),
]
RIGHT: list[tuple[Any, ...]] = [
    ("", {"build_layers": lambda self: (torch.nn.Linear(4, size) for size in (4, 1))}, "pipeline"),
    (
        "",
        {
            "loss": loss_of(named),
            "evaluate": returning({"validation_loss": 1.0}),
            "build_parameters": lambda self, model: iter([{"params": model.parameters()}]),
        },
    ),
    ("", {"loss": loss_of(lambda errors: errors.mean().reshape(1))}),
]
CASES = [Case(*each) for each in (*WRONG, *RIGHT)]


def said_of_each() -> list[str]:
    """In a rank: what is said of each trial, one after the other."""
    return [said_of(each.kind, each.methods, overwrite_deepspeed_args=each.over) for each in CASES]


def test_what_is_wrong_is_said(one_rank: Ranks) -> None:
    [said] = one_rank.run(said_of_each)
    for case, text in zip(CASES, said, strict=True):
        assert case.words in text
        assert ("fix: " in text) == bool(text) == bool(case.words), text


def test_ranks_that_share_the_layers_of_a_pipeline_hold_a_part_each(two_ranks: Ranks) -> None:
    """Of whole layers each would train a copy."""
    for said in two_ranks.run(said_of, "pipeline", {}, model_parallel_size=2):
        assert "hyperparameters.model_parallel_size = 2" in said
        assert "no parameter of MyPipeline's layers is cut" in said


def warned() -> list[str]:
    """In a rank: the warnings of a trial with a method that is named as a hook, and parameters that are left out."""
    import logging

    class Misspelt(PyTorchCallback):
        def on_train_start(self) -> None: ...

    methods = {
        "build_callbacks": returning({"mine": Misspelt()}),
        "build_parameters": lambda self, model: [{"params": [*model.parameters()][1:], "lr": 0.2}],
    }
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("determined_ds").addHandler(handler)
    assert said_of("", methods, overwrite_deepspeed_args=WARM_UP) == ""
    return said


def test_what_would_be_ignored_is_named(one_rank: Ranks) -> None:
    [said] = one_rank.run(warned)
    for words in (
        "Misspelt.on_train_start (",
        "does not name 0.weight",
        "WarmupLR sets the rate of all groups",
    ):
        assert any(words in each for each in said), words


def without(name: str) -> str:
    """In a rank: what is said where this DeepSpeed has no such method of its engines."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    delattr(DeepSpeedEngine, name)
    return said_of("", {})


def test_a_deepspeed_without_a_method_that_is_corrected_is_refused(one_rank: Ranks) -> None:
    """It would train on other numbers, silently."""
    [said] = one_rank.run(without, "clip_fp32_gradients")
    assert "has no clip_fp32_gradients" in said
    assert "fix: pip install deepspeed==" in said
