"""A warm start takes the weights alone: it is a new training whose model happens to begin with them.

Each strategy is held to that by a training whose trial puts the same weights into its model itself: its metrics and
every tensor of its checkpoint are the same to the last bit, optimizer, schedule, generators and data included.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial
from determined_ds import load_state_dict_from_checkpoint_path as weights_of
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words
from tests.package import checkpoints, tensors

FEATURES, OUTPUTS = 8, 4  # even, as ZeRO leaves the padding of odd sizes to chance
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "pipeline": {"zero_stage": 1, "kind": "piped"},
    "two-engines": {"zero_stage": 1, "kind": "pair"},
    "zero3-two-engines": {"zero_stage": 3, "kind": "pair"},
}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.again = torch.nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.frozen = torch.nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.last = torch.nn.Linear(FEATURES, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.last(self.frozen(self.again((hidden - self.mean).relu())))


class Data:
    def begun(self: Any, model: torch.nn.Module, engine: int = 0, prefix: str = "") -> torch.nn.Module:
        """The model; with the weights of the checkpoint that the hyperparameter begin_with names, if any."""
        if begin_with := self.context.get_hparams().get("begin_with"):
            found = weights_of(begin_with, engine=engine)
            own = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
            model.load_state_dict(own)
        return model

    def prepare(self) -> None:
        inputs = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(0))
        self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :OUTPUTS])

    def build_training_data_loader(self: Any) -> Any:
        return self.training_loader(self.data)

    def build_validation_data_loader(self: Any) -> Any:
        return self.validation_loader(self.data)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)


class Whole(Data, DataParallelTrial):
    def build_model(self) -> torch.nn.Module:
        return self.begun(Tied())


class Piped(Data, PipelineTrial):
    partition_method = "uniform"

    def build_layers(self) -> list[Any]:
        pairs = itertools.pairwise([FEATURES] * 4 + [OUTPUTS])
        return [self.begun(torch.nn.Linear(*pair), prefix=f"{at}.") for at, pair in enumerate(pairs)]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, targets)


class Pair(Data, SeveralEnginesTrial):
    def build_models(self) -> dict[str, torch.nn.Module]:
        models = [torch.nn.Linear(FEATURES, OUTPUTS), torch.nn.Linear(FEATURES, OUTPUTS, bias=False)]
        return dict(zip(("one", "other"), map(self.begun, models, (0, 1)), strict=True))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        batch = self.context.to_device(next(dataloader_iter))
        for engine in self.engines.values():
            loss = self.loss(engine, batch)
            engine.backward(loss)
            engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(self.engine, self.context.to_device(next(dataloader_iter)))}


def train(
    run_dir: Path,
    *,
    zero_stage: int,
    kind: str = "whole",
    optimizer: str = "AdamW",
    begin_with: str | None = None,
    **fit: Any,
) -> str:
    """In a rank: train two batches. Returns what was raised."""
    from determined.pytorch import Batch

    from determined_ds import DeterminedDSError, Trainer, open_context

    rate = {"lr": 0.01} if optimizer == "Adagrad" else {"lr": 0.01, "torch_adam": True}
    ds_config = {
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": optimizer, "params": rate},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01}},
    }
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config, "begin_with": begin_with}
    hparams |= {"pipe_parallel_size": 2} if kind == "piped" else {}
    trial: Any = {"whole": Whole, "piped": Piped, "pair": Pair}[kind]
    try:
        with open_context(hparams=hparams, run_dir=str(run_dir), accelerator="cpu") as context:
            Trainer(trial(context), context).fit(max_length=Batch(2), reporting_period=Batch(1), **fit)
    except DeterminedDSError as error:
        return str(error)
    return ""


def newest(run_dir: Path) -> str:
    return str(checkpoints(run_dir)[0])


def same_end(one: Path, other: Path) -> list[str]:
    """Where two runs end differently, in metrics and in every tensor of the last checkpoint."""
    return differences(last_words(one), last_words(other))


def rates(run_dir: Path) -> list[float]:
    return [metrics["lr"] for group, _, metrics in last_words(run_dir)["metrics"] if group == "training"]


LONG = pytest.mark.long("the same parts as under a strategy that is short")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=LONG if name in ("zero0", "zero2", "two-engines") else ())
        for name in STRATEGIES
    ],
)
def test_it_is_a_new_training_that_begins_with_the_weights(
    strategy: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    settings, source, fork, anew = (
        STRATEGIES[strategy],
        *(tmp_path / name for name in ("source", "fork", "anew")),
    )
    assert two_ranks.run(train, source, **settings) == ["", ""]
    two_ranks.run(train, fork, **settings, fork=newest(source))
    two_ranks.run(train, anew, **settings, begin_with=newest(source))
    assert same_end(fork, anew) == []
    assert same_end(fork, source) != []
    assert rates(fork) == rates(source)


def test_all_goes_on_with_optimizer_and_schedule(two_ranks: Ranks, tmp_path: Path) -> None:
    """Counting batches from 0 all the same; the optimizer's moments are those of four steps."""
    source, fork = tmp_path / "source", tmp_path / "fork"
    two_ranks.run(train, source, zero_stage=1)
    two_ranks.run(train, fork, zero_stage=1, fork=newest(source), warm_start="all")
    assert rates(fork)[0] > rates(source)[-1]
    assert [steps for _, steps, _ in last_words(fork)["metrics"]] == [1, 2, 2]
    steps = {value.item() for (_, state), value in tensors(Path(newest(fork))).items() if state == "step"}
    assert steps == {4.0}


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_other_slots_another_strategy_and_optimizer_take_the_same_weights(
    zero_stage: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Written by two ranks under ZeRO 3 with AdamW, taken by one with another optimizer."""
    source, fork, anew = (tmp_path / name for name in ("source", "fork", "anew"))
    two_ranks.run(train, source, zero_stage=3)
    other: dict[str, Any] = {"zero_stage": zero_stage, "optimizer": "Adagrad"}
    assert one_rank.run(train, fork, **other, fork=newest(source)) == [""]
    assert one_rank.run(train, anew, **other, begin_with=newest(source)) == [""]
    assert same_end(fork, anew) == []


def test_another_model_and_another_word_are_refused(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(train, tmp_path / "pair", zero_stage=1, kind="pair")
    fork = newest(tmp_path / "pair")
    [said] = one_rank.run(train, tmp_path / "a", zero_stage=1, fork=fork)
    assert "it holds 2 engines, and this trial has 1" in said
    [said] = one_rank.run(train, tmp_path / "b", zero_stage=0, kind="pair", fork=fork, warm_start="most")
    assert "use one of weights, all" in said
