"""What a script may do wrong with a session is refused in plain words, each naming what to write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.ranks import Ranks

DS = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
HPARAMS = {"global_batch_size": 8, "deepspeed_config": DS, "fit": {"max_length": {"batches": 3}}}
ACCUMULATING = {**HPARAMS, "deepspeed_config": {**DS, "gradient_accumulation_steps": 2}}


def engine_of(s: Any, **more: Any) -> Any:
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 2)
    config = {**s.ds_config, **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def data() -> Any:
    import torch

    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))


def begun(s: Any, dataset: Any = None, **options: Any) -> tuple[Any, Any]:
    """An engine and a loader that were handed over."""
    engine = engine_of(s)
    loader = s.loader(data() if dataset is None else dataset, **options)
    s.checkpoint(engine)
    return engine, loader


def step(engine: Any, batch: Any) -> Any:
    import torch

    loss = torch.nn.functional.mse_loss(engine(batch[0]), batch[1])
    engine.backward(loss)
    engine.step()
    return loss


def train(s: Any, metrics: Callable[[Any], Any] = lambda loss: {"loss": loss}, **how: Any) -> None:
    engine, loader = begun(s, **how)
    for batch in loader:
        s.report(metrics(step(engine, batch)))


def loader_of_threes(s: Any) -> None:
    import torch

    train(s, dataset=torch.utils.data.DataLoader(data(), batch_size=3, shuffle=True))


def half_stepped(s: Any) -> None:
    """The first micro-batch of the second step is left out: the engine accumulates over two steps."""
    engine, loader = begun(s)
    for number, batch in enumerate(loader):
        if number != 2:
            step(engine, batch)


def never_iterated(s: Any) -> None:
    s.loader(data())
    s.checkpoint(engine_of(s))


class Mistake(NamedTuple):
    """A script, and the error that it ends with."""

    script: Callable[[Any], Any]
    kind: str
    said: tuple[str, ...]
    config: Any


def mistake(script: Callable[[Any], Any], kind: str, *said: str, config: Any = HPARAMS) -> Mistake:
    return Mistake(script, kind, said, config)


def reporting(metrics: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda s: train(s, metrics)


STAGE_2, TO_LENGTH = {"stage": 2}, {**HPARAMS, "fit": {}}
MISTAKES = {
    "iterated too early": mistake(
        lambda s: next(iter(s.loader(data()))),
        "ConfigError",
        "no engine was handed over",
        "s.checkpoint(engine)",
    ),
    "a batch left open": mistake(
        lambda s: s.ds_config,
        "ConfigError",
        *("s.resolved", "state hyperparameters.global_batch_size", "call s.checkpoint(engine) first"),
        config={"deepspeed_config": DS},
    ),
    "two loaders": mistake(
        lambda s: [s.loader(data()) for _ in range(2)], "ConfigError", "s.loader: was called before"
    ),
    "a batch size": mistake(
        lambda s: train(s, batch_size=3), "ConfigError", "s.loader: got batch_size=3", "micro-batch size, 8"
    ),
    "a loader of other batches": mistake(
        loader_of_threes, "ConfigError", "s.loader = 3", "not the micro-batch size 8", "use s.loader(dataset)"
    ),
    "another stage": mistake(
        lambda s: s.checkpoint(engine_of(s, zero_optimization=STAGE_2)),
        "ConfigError",
        *("the engine of s.checkpoint has 2", "or initialize the engine with config=s.ds_config"),
        config={**HPARAMS, "zero_stage": 1},
    ),
    "no engine": mistake(lambda s: s.checkpoint(), "ConfigError", "given no engine", "deepspeed.init"),
    "a module": mistake(lambda s: s.checkpoint(engine_of(s).module), "ConfigError", "got a Linear"),
    "a second engine later": mistake(
        lambda s: [s.checkpoint(engine_of(s)) for _ in range(2)], "ConfigError", "its first call was not"
    ),
    "a state without methods": mistake(
        lambda s: s.checkpoint(engine_of(s), best=0.5), "ConfigError", "best is the float 0.5"
    ),
    "never stepped": mistake(lambda s: list(begun(s)[1]), "TrainingError", "no engine has made a step"),
    "half stepped": mistake(
        half_stepped, "TrainingError", "stepped 3 times", "accumulation of 2", config=ACCUMULATING
    ),
    "no number": mistake(
        reporting(lambda loss: {"loss": f"{loss}"}), "TrainingError", "s.report: metric 'loss' is"
    ),
    "no metrics": mistake(reporting(lambda loss: 0.5), "TrainingError", "s.report: got the float 0.5"),
    "never iterated": mistake(never_iterated, "TrainingError", "nothing was trained", "was not iterated"),
    "a loss that is not finite": mistake(
        reporting(lambda loss: {"loss": loss * float("nan")}), "NotFiniteError", "not finite at batch 1"
    ),
    "no length": mistake(
        lambda s: [None for _ in (begun(s), s)[1].steps()],
        "ConfigError",
        *("nothing says how long to train", "s.steps(1000)"),
        config=TO_LENGTH,
    ),
    "an endless pass": mistake(
        lambda s: train(s, dataset=lambda: iter(data())),
        "ConfigError",
        *("has no length", "fit.max_length"),
        config=TO_LENGTH,
    ),
    "a DeepSpeed JSON": mistake(begun, "ConfigError", "is not an experiment", config="ds.json"),
    "a misspelt key": mistake(
        begun, "ConfigError", "global_batch_sise", config={"hyperparameters": {"global_batch_sise": 8}}
    ),
}


def in_session(run_dir: str, script: Callable[[Any], Any], config: Any = HPARAMS) -> tuple[str, str]:
    """In a rank: the kind and the words of the error that a script ends with."""
    import determined_ds

    try:
        with determined_ds.session(config, run_dir=run_dir, accelerator="cpu") as s:
            script(s)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def all_mistakes(folder: str) -> dict[str, tuple[str, str]]:
    """In a rank: what comes of each, one after the other."""
    os.chdir(folder)
    Path("ds.json").write_text(json.dumps(DS))
    return {name: in_session(name, each.script, each.config) for name, each in MISTAKES.items()}


@pytest.fixture(scope="module")
def made(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mistakes")
    return folder, one_rank.run(all_mistakes, str(folder))[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused_and_the_run_is_reported_as_failed(name: str, made: Any) -> None:
    (folder, found), expected = made, MISTAKES[name]
    kind, said = found[name]
    assert kind == expected.kind, said
    assert all(word in said for word in expected.said), said
    if expected.script is begun:  # no run was made
        return
    result = json.loads((folder / name / "result.json").read_text())
    assert result["status"] == ("failed" if kind in ("TrainingError", "NotFiniteError") else "invalid")
    assert list((folder / name / "checkpoints").glob("*")) == []


def of_rank_0(s: Any) -> None:
    engine, loader = begun(s)
    for _ in range(2):
        for batch in loader:
            step(engine, batch)
        if s.rank == 0:
            s.checkpoint()


def test_a_checkpoint_on_some_ranks_only_is_refused_by_its_place(two_ranks: Ranks, tmp_path: Path) -> None:
    for kind, said in two_ranks.run(in_session, str(tmp_path / "run"), of_rank_0):
        assert kind == "TrainingError", said
        assert "s.checkpoint() was called on some ranks only, after batch 2" in said
        assert said.startswith("test_misuse.py:")
