"""A warm start takes the weights alone: to the last bit, it is a new training whose trial begins with them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.strategies import PAIRS, ZERO, Strategy, hyperparameters, trial_class
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words
from tests.package import checkpoints, records, tensors
from tests.train.small import fit

STRATEGIES = {
    **{name: ZERO[name] for name in ("zero0", "zero1", "zero3")},
    "pipeline": ZERO["pipe2_zero1"],
    "zero3-two-engines": PAIRS["3 and 3"],
}
SOURCE = {"draw": 1}  # other weights and buffers than those with which a fork is built


def train(run_dir: Path, strategy: Strategy, more: dict[str, Any], **how: Any) -> None:
    """In a rank: train two batches; ``more`` is of the hyperparameters."""
    hparams = hyperparameters(strategy)
    # The first step moves them, too.
    hparams["deepspeed_config"]["scheduler"]["params"]["warmup_min_lr"] = 0.001
    hparams["deepspeed_config"] |= more.pop("ds_config", {})
    length: dict[str, Any] = {"max_length": ("batches", 2), "reporting_period": ("batches", 1)}
    fit(run_dir, trial_class(strategy), hparams={**hparams, **more}, **length, **how)


def newest(run_dir: Path) -> str:
    return str(checkpoints(run_dir)[0])


def same_end(one: Path, other: Path) -> list[str]:
    """Where two runs end differently, in metrics and in every tensor of the last checkpoint."""
    words = []
    for run_dir in (one, other):
        found = last_words(run_dir)
        # Files of slices have padding, which is left to chance.
        states = {name: each for name, each in found["states"].items() if name.endswith((".pt", ".pth"))}
        engines = range(len(list(Path(newest(run_dir)).glob("model*"))))
        words.append([found["metrics"], states, [tensors(Path(newest(run_dir)), n) for n in engines]])
    return differences(*words)


def rates(run_dir: Path) -> list[float]:
    return [metrics["lr"] for _, metrics in records(run_dir, "training")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_a_new_training_that_begins_with_the_weights(
    strategy: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    settings = STRATEGIES[strategy]
    source, fork, anew = (tmp_path / name for name in ("source", "fork", "anew"))
    two_ranks.run(train, source, settings, SOURCE)
    two_ranks.run(train, fork, settings, {}, fork=newest(source))
    two_ranks.run(train, anew, settings, {"begin_with": newest(source)})
    assert same_end(fork, anew) == []
    assert same_end(fork, source) != []
    assert rates(fork) == rates(source)


def test_all_goes_on_with_optimizer_and_schedule(two_ranks: Ranks, tmp_path: Path) -> None:
    """Counting batches from 0 all the same; the optimizer's moments are those of four steps."""
    source, fork = tmp_path / "source", tmp_path / "fork"
    two_ranks.run(train, source, ZERO["zero1"], SOURCE)
    two_ranks.run(train, fork, ZERO["zero1"], {}, fork=newest(source), warm_start="all")
    assert rates(fork)[0] > rates(source)[-1]
    assert [steps for steps, _ in records(fork, "training")] == [1, 2]
    steps = {value.item() for (_, state), value in tensors(Path(newest(fork))).items() if state == "step"}
    assert steps == {4.0}


def test_other_slots_another_strategy_and_optimizer_take_the_same_weights(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Written by two ranks under ZeRO 3 with AdamW, taken by one under ZeRO 1 with another optimizer."""
    source, fork, anew = (tmp_path / name for name in ("source", "fork", "anew"))
    two_ranks.run(train, source, ZERO["zero3"], SOURCE)
    other = {"ds_config": {"optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}}
    one_rank.run(train, fork, ZERO["zero1"], other, fork=newest(source))
    one_rank.run(train, anew, ZERO["zero1"], {**other, "begin_with": newest(source)})
    assert same_end(fork, anew) == []
