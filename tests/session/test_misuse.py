"""What a script may do wrong with a session is refused in plain words, each naming what to write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.harness.ranks import Ranks

DS = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
HPARAMS = {"global_batch_size": 8, "deepspeed_config": DS, "fit": {"max_length": {"batches": 3}}}
ACCUMULATING = {**HPARAMS, "deepspeed_config": {**DS, "gradient_accumulation_steps": 2}}
ENDLESS, OF_STAGE_1 = {**HPARAMS, "fit": {}}, {**HPARAMS, "zero_stage": 1}
DATA = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))


def engine_of(s: Any, **more: Any) -> Any:
    import deepspeed

    model, config = torch.nn.Linear(4, 2), {**s.ds_config, **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def begun(s: Any, dataset: Any = DATA) -> tuple[Any, Any]:
    """An engine and a loader that were handed over."""
    engine, loader = engine_of(s), s.loader(dataset)
    s.checkpoint(engine)
    return engine, loader


def step(engine: Any, batch: Any) -> Any:
    loss = torch.nn.functional.mse_loss(engine(batch[0]), batch[1])
    engine.backward(loss)
    engine.step()
    return loss


def train(s: Any, metric: Callable[[Any], Any] = lambda loss: loss, dataset: Any = DATA) -> None:
    engine, loader = begun(s, dataset)
    for batch in loader:
        s.report({"loss": metric(step(engine, batch))})


def half_stepped(s: Any) -> None:
    """The first micro-batch of the second step is left out: the engine accumulates over two steps."""
    engine, loader = begun(s)
    for number, batch in enumerate(loader):
        if number != 2:
            step(engine, batch)


REFUSED, FAILED = "ConfigError", "TrainingError"
# A script, how it ends, what is said, and its configuration.
MISTAKES: dict[str, tuple[Callable[[Any], Any], str, list[str], Any]] = {
    "a loader of other batches": (
        lambda s: train(s, dataset=torch.utils.data.DataLoader(DATA, 3)),
        REFUSED,
        ["s.loader = 3", "not the micro-batch size 8", "use s.loader(dataset)"],
        HPARAMS,
    ),
    "another stage": (
        lambda s: s.checkpoint(engine_of(s, zero_optimization={"stage": 2})),
        REFUSED,
        ["the engine of s.checkpoint has 2", "or initialize the engine with config=s.ds_config"],
        OF_STAGE_1,
    ),
    "never stepped": (lambda s: list(begun(s)[1]), FAILED, ["no engine has made a step"], HPARAMS),
    "half stepped": (half_stepped, FAILED, ["stepped 3 times", "accumulation of 2"], ACCUMULATING),
    "never iterated": (begun, FAILED, ["nothing was trained", "was not iterated"], HPARAMS),
    "a loss that is not finite": (
        lambda s: train(s, lambda loss: loss * float("nan")),
        "NotFiniteError",
        ["not finite at batch 1"],
        HPARAMS,
    ),
    "no length": (
        lambda s: list((begun(s), s)[1].steps()),
        REFUSED,
        ["nothing says how long", "s.steps(1000)"],
        ENDLESS,
    ),
    "an endless pass": (
        lambda s: train(s, dataset=lambda: iter(DATA)),
        REFUSED,
        ["has no length", "fit.max_length"],
        ENDLESS,
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
    return {name: in_session(name, script, config) for name, (script, _, _, config) in MISTAKES.items()}


def test_it_is_refused_and_the_run_is_reported_as_failed(one_rank: Ranks, tmp_path: Path) -> None:
    for name, (kind, said) in one_rank.run(all_mistakes, str(tmp_path))[0].items():
        _, expected, words, _ = MISTAKES[name]
        assert kind == expected, (name, said)
        assert all(word in said for word in words), (name, said)
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["status"] == ("invalid" if kind == REFUSED else "failed"), name
        assert not list((tmp_path / name / "checkpoints").glob("*")), name
