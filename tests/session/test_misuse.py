"""What a script may do wrong with a session is refused in plain words, each naming what to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks

DS = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
HPARAMS = {"global_batch_size": 8, "deepspeed_config": DS, "fit": {"max_length": {"batches": 3}}}


def in_session(run_dir: str, name: str, config: Any = HPARAMS) -> tuple[str, str]:
    """In a rank: the kind and the words of the error that a script of this module ends with."""
    import determined_ds

    try:
        with determined_ds.session(config, run_dir=run_dir, accelerator="cpu") as s:
            globals()[name](s)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def engine_of(s: Any, **more: Any) -> Any:
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 2)
    config = {**(s.ds_config if not more else {}), **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def data() -> Any:
    import torch

    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))


def train(
    s: Any, engine: Any, loader: Any, metrics: Callable[[Any], Any] = lambda loss: {"loss": loss}
) -> None:
    import torch

    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        s.report(metrics(loss))


def iterated_too_early(s: Any) -> None:
    next(iter(s.loader(data())))


def a_batch_left_open(s: Any) -> None:
    engine_of(s)


def two_loaders(s: Any) -> None:
    s.loader(data())
    s.loader(data())


def a_batch_size(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(data(), batch_size=3)
    s.checkpoint(engine)
    next(iter(loader))


def a_loader_of_other_batches(s: Any) -> None:
    import torch

    loader = s.loader(torch.utils.data.DataLoader(data(), batch_size=3, shuffle=True))
    s.checkpoint(engine_of(s))
    next(iter(loader))


def another_batch(s: Any) -> None:
    s.checkpoint(engine_of(s, **{**s.ds_config, "train_batch_size": 6, "train_micro_batch_size_per_gpu": 6}))


def another_stage(s: Any) -> None:
    s.checkpoint(engine_of(s, **{**s.ds_config, "zero_optimization": {"stage": 2}}))


def no_engine(s: Any) -> None:
    s.checkpoint()


def a_module(s: Any) -> None:
    s.checkpoint(engine_of(s).module)


def a_second_engine_later(s: Any) -> None:
    s.checkpoint(engine_of(s))
    s.checkpoint(engine_of(s))


def a_state_without_methods(s: Any) -> None:
    s.checkpoint(engine_of(s), best=0.5)


def never_stepped(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(data())
    s.checkpoint(engine)
    for _ in loader:
        pass


def half_stepped(s: Any) -> None:
    """The first micro-batch of the second step is left out: the engine accumulates over two steps."""
    engine = engine_of(s)
    loader = s.loader(data())
    s.checkpoint(engine)
    for number, batch in enumerate(loader):
        if number != 2:
            train(s, engine, [batch])


def no_number(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(data())
    s.checkpoint(engine)
    train(s, engine, loader, lambda loss: {"loss": f"{loss}"})


def no_metrics(s: Any) -> None:
    engine = engine_of(s)
    s.checkpoint(engine)
    s.report(0.5)


def a_report_too_early(s: Any) -> None:
    s.report({"loss": 1.0})


def never_iterated(s: Any) -> None:
    s.loader(data())
    s.checkpoint(engine_of(s))


def a_loss_that_is_not_finite(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(data())
    s.checkpoint(engine)
    for _ in s.epochs(9):
        train(s, engine, loader, lambda loss: {"loss": loss * float("nan")})


def no_length(s: Any) -> None:
    engine = engine_of(s)
    s.loader(data())
    s.checkpoint(engine)
    for _ in s.steps():
        pass


def an_endless_pass(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(lambda: iter(data()))
    s.checkpoint(engine)
    train(s, engine, loader)


def no_epochs(s: Any) -> None:
    s.loader(data())
    s.checkpoint(engine_of(s))
    next(iter(s.epochs(0)))


def a_checkpoint_of_rank_0(s: Any) -> None:
    engine = engine_of(s)
    loader = s.loader(data())
    s.checkpoint(engine)
    for _ in s.epochs(9):
        train(s, engine, loader)
        if s.rank == 0:
            s.checkpoint()


WITHOUT_LENGTH = {**HPARAMS, "fit": {}}
ACCUMULATING = {**HPARAMS, "deepspeed_config": {**DS, "gradient_accumulation_steps": 2}}
BATCH_FIXES = ("state hyperparameters.global_batch_size", "call s.checkpoint(engine) first")
REFUSED: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("iterated_too_early", HPARAMS, "ConfigError", ("no engine was handed over", "s.checkpoint(engine)")),
    ("a_batch_left_open", {"deepspeed_config": DS}, "ConfigError", ("s.ds_config", *BATCH_FIXES)),
    ("two_loaders", HPARAMS, "ConfigError", ("s.loader: was called before", "ConcatDataset")),
    ("a_batch_size", HPARAMS, "TrialError", ("s.loader: got batch_size=3", "micro-batch size, 8")),
    ("a_loader_of_other_batches", HPARAMS, "ConfigError", ("s.loader = 3", "not the micro-batch size 8")),
    ("another_batch", HPARAMS, "ConfigError", ("train_batch_size",)),
    (
        "another_stage",
        {**HPARAMS, "zero_stage": 1},
        "ConfigError",
        ("the engine of s.checkpoint has 2", "or initialize the engine with config=s.ds_config"),
    ),
    ("no_engine", HPARAMS, "ConfigError", ("given no engine", "deepspeed.initialize")),
    ("a_module", HPARAMS, "ConfigError", ("got a Linear", "expected an engine of DeepSpeed")),
    ("a_second_engine_later", HPARAMS, "ConfigError", ("its first call was not given",)),
    ("a_state_without_methods", HPARAMS, "ConfigError", ("best is the float 0.5", "state_dict")),
    ("never_stepped", HPARAMS, "TrainingError", ("no engine has made a step", "engine.step()")),
    ("half_stepped", ACCUMULATING, "TrainingError", ("stepped 3 times", "accumulation of 2")),
    ("no_number", HPARAMS, "TrainingError", ("s.report: metric 'loss' is the str",)),
    ("no_metrics", HPARAMS, "TrainingError", ("s.report: got the float 0.5", 's.report({"loss": loss})')),
    ("a_report_too_early", HPARAMS, "ConfigError", ("s.report: no engine was handed over",)),
    ("never_iterated", HPARAMS, "TrainingError", ("nothing was trained", "was not iterated")),
    ("a_loss_that_is_not_finite", HPARAMS, "NotFiniteError", ("not finite at batch 1",)),
    ("no_length", WITHOUT_LENGTH, "ConfigError", ("nothing says how long to train", "s.steps(1000)")),
    ("an_endless_pass", WITHOUT_LENGTH, "ConfigError", ("has no length", "fit.max_length")),
    ("no_epochs", HPARAMS, "ConfigError", ("s.epochs: got the int 0",)),
]


@pytest.mark.parametrize(("name", "config", "kind", "words"), REFUSED, ids=[each[0] for each in REFUSED])
def test_it_is_refused_and_the_run_is_reported_as_failed(
    name: str, config: Any, kind: str, words: tuple[str, ...], one_rank: Ranks, tmp_path: Path
) -> None:
    [(found, said)] = one_rank.run(in_session, str(tmp_path / "run"), name, config)
    assert found == kind, said
    assert all(word in said for word in words), said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == ("failed" if kind in ("TrainingError", "NotFiniteError") else "invalid")
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


def test_a_checkpoint_on_some_ranks_only_is_refused_by_its_place(two_ranks: Ranks, tmp_path: Path) -> None:
    config = {**HPARAMS, "fit": {"max_length": {"batches": 9}}}
    for kind, said in two_ranks.run(in_session, str(tmp_path / "run"), "a_checkpoint_of_rank_0", config):
        assert kind == "TrainingError", said
        assert "s.checkpoint() was called on some ranks only, after batch 2" in said
        assert said.startswith("test_misuse.py:")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (7, "expected the path of an experiment's YAML"),
        ("nowhere.yaml", "nowhere.yaml"),
        ({"global_batch_size": "many"}, "global_batch_size"),
        ({"hyperparameters": {"global_batch_sise": 8, "deepspeed_config": "ds.json"}}, "global_batch_sise"),
    ],
)
def test_what_is_not_a_configuration_is_refused(
    config: Any, word: str, one_rank: Ranks, tmp_path: Path
) -> None:
    [(kind, said)] = one_rank.run(in_session, str(tmp_path / "run"), "no_engine", config)
    assert kind == "ConfigError", said
    assert word in said
