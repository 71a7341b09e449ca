"""What a script may do wrong with a session is refused in plain words, each naming what to write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def torch_loader(batch_size: int) -> Any:
    import torch

    return torch.utils.data.DataLoader(data(), batch_size=batch_size, shuffle=True)


def half_stepped(s: Any) -> None:
    """The first micro-batch of the second step is left out: the engine accumulates over two steps."""
    engine, loader = begun(s)
    for number, batch in enumerate(loader):
        if number != 2:
            step(engine, batch)


STAGE_2, TO_LENGTH = {"stage": 2}, {**HPARAMS, "fit": {}}
Mistake = tuple[
    Callable[[Any], Any], str, list[str], Any
]  # a script, how it ends, what is said, its configuration


def config_error(script: Callable[[Any], Any], *said: str, config: Any = HPARAMS) -> Mistake:
    return script, "ConfigError", list(said), config


def training_error(script: Callable[[Any], Any], *said: str, config: Any = HPARAMS) -> Mistake:
    return script, "TrainingError", list(said), config


MISTAKES: dict[str, Mistake] = {
    "iterated too early": config_error(
        lambda s: next(iter(s.loader(data()))), "no engine was handed over", "s.checkpoint(engine)"
    ),
    "a batch left open": config_error(
        lambda s: s.ds_config,
        *("s.resolved", "state hyperparameters.global_batch_size", "call s.checkpoint(engine) first"),
        config={"deepspeed_config": DS},
    ),
    "two loaders": config_error(
        lambda s: [s.loader(data()) for _ in range(2)], "s.loader: was called before"
    ),
    "a loader of other batches": config_error(
        lambda s: train(s, dataset=torch_loader(3)),
        *("s.loader = 3", "not the micro-batch size 8", "use s.loader(dataset)"),
    ),
    "another stage": config_error(
        lambda s: s.checkpoint(engine_of(s, zero_optimization=STAGE_2)),
        *("the engine of s.checkpoint has 2", "or initialize the engine with config=s.ds_config"),
        config={**HPARAMS, "zero_stage": 1},
    ),
    "a module": config_error(lambda s: s.checkpoint(engine_of(s).module), "got a Linear"),
    "a second engine": config_error(
        lambda s: [s.checkpoint(engine_of(s)) for _ in "12"], "its first call was not"
    ),
    "a number": config_error(lambda s: s.checkpoint(engine_of(s), best=0.5), "best is the float 0.5"),
    "never stepped": training_error(lambda s: list(begun(s)[1]), "no engine has made a step"),
    "half stepped": training_error(half_stepped, "stepped 3 times", "accumulation of 2", config=ACCUMULATING),
    "no number": training_error(lambda s: train(s, lambda loss: {"loss": f"{loss}"}), "metric 'loss' is"),
    "never iterated": training_error(
        lambda s: (s.loader(data()), s.checkpoint(engine_of(s))), "nothing was trained", "was not iterated"
    ),
    "a loss that is not finite": (
        lambda s: train(s, lambda loss: {"loss": loss * float("nan")}),
        *("NotFiniteError", ["not finite at batch 1"], HPARAMS),
    ),
    "no length": config_error(
        lambda s: list((begun(s), s)[1].steps()), "nothing says how long", "s.steps(1000)", config=TO_LENGTH
    ),
    "an endless pass": config_error(
        lambda s: train(s, dataset=lambda: iter(data())), "has no length", "fit.max_length", config=TO_LENGTH
    ),
    "a DeepSpeed JSON": config_error(begun, "is not an experiment", config="ds.json"),
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
    return {name: in_session(name, script, config) for name, (script, _, _, config) in MISTAKES.items()}


@pytest.fixture(scope="module")
def made(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mistakes")
    return folder, one_rank.run(all_mistakes, str(folder))[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused_and_the_run_is_reported_as_failed(name: str, made: Any) -> None:
    (folder, found), (script, expected, words, _) = made, MISTAKES[name]
    kind, said = found[name]
    assert kind == expected, said
    assert all(word in said for word in words), said
    if script is begun:  # no run was made
        return
    result = json.loads((folder / name / "result.json").read_text())
    assert result["status"] == ("invalid" if kind == "ConfigError" else "failed")
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
