"""What Determined tests of its DeepSpeed trainer holds for a trial that is moved here by one changed import.

Each test names the one of Determined's that it restates: ``harness/tests/experiment/pytorch/test_deepspeed_trial.py``
of determined 0.38.1. The trials (``trials.py``) are trained on one rank and on two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks

BATCHES = 6
KINDS = ("Replicated", "Accumulating", "Piped", "TwoEngines", "OwnLoaders", "Reducing", "SeveralNumbers")


def run(kind: str, home: Path, epochs: int = 0, **fit: Any) -> dict[str, Any]:
    """In a rank: train a trial of ``trials`` without hyperparameters. What its callback was handed, or the error."""
    from determined.pytorch import Batch, Epoch

    from determined_ds import DeterminedDSError
    from determined_ds import deepspeed as det_ds
    from tests.dropin import trials

    os.environ["XDG_DATA_HOME"] = str(home)
    fit |= {"reporting_period": Batch(1), "validation_period": Batch(BATCHES)}
    try:
        with det_ds.init() as context:
            trial = getattr(trials, kind)(context)
            length = Epoch(epochs) if epochs else Batch(BATCHES)
            det_ds.Trainer(trial, context).fit(max_length=length, **fit)
            batch = context.resolved.batch
    except DeterminedDSError as error:
        return {"error": f"{type(error).__name__} {error}"}
    handed = trial.kept.handed
    return {
        "training": [each["loss"] for each in handed["training_workload_end"] if "loss" in each],
        "all": handed["training_workload_end"],
        "validation": handed["validation_end"],
        "uuids": handed["checkpoint_upload_end"],
        "called": {name: len(each) for name, each in handed.items()},
        "sizes": (batch.global_batch_size, batch.micro_batch_size, batch.accumulation, batch.replicas),
    }


def run_all(home: Path) -> dict[str, dict[str, Any]]:
    return {kind: run(kind, home / kind) for kind in KINDS}


@pytest.fixture(scope="module", params=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def home(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def found(ranks: Ranks, home: Path) -> dict[str, dict[str, Any]]:
    """Kind of trial -> what it has trained, on the chief."""
    trained: dict[str, dict[str, Any]] = ranks.run(run_all, home)[0]
    return trained


def test_a_trial_trains_by_the_configuration_of_its_engine(ranks: Ranks, found: Any) -> None:
    """``test_linear_model``, ``test_linear_pipeline_model``, ``test_custom_dataloader``: nothing is stated beside it.

    A loader of its own may never end: its length is a pass.
    """
    for kind in ("Replicated", "Piped", "OwnLoaders"):
        losses, sizes = found[kind]["training"], found[kind]["sizes"]
        assert sizes == (16, 4, 4 // ranks.size, ranks.size), kind
        assert losses[-2] < losses[0], f"{kind} learns, over two batches a pass"
        assert losses[-1] < losses[1], kind
        (metrics,) = found[kind]["validation"]
        assert 0 < metrics["validation_loss"] < max(losses)


def test_gradients_accumulated_by_hand_are_those_of_the_loop(found: Any) -> None:
    """``test_manual_grad_acc_metrics``."""
    assert found["Accumulating"]["training"] == pytest.approx(found["Replicated"]["training"], rel=1e-6)


def test_two_engines_train(found: Any) -> None:
    """``test_two_model_engines``."""
    training, (validation,) = found["TwoEngines"]["all"], found["TwoEngines"]["validation"]
    assert all(metrics["loss1"] == metrics["loss2"] for metrics in training)
    assert validation["loss1"] == validation["loss2"] < training[0]["loss1"]


def test_a_reducer_sees_all_ranks_and_a_metric_of_several_numbers_is_their_mean(found: Any) -> None:
    """``test_custom_reducer``, ``test_linear_non_scalar_metrics``: lists of arrays, tensors of several elements."""
    from tests.dropin.trials import VALIDATION_SAMPLES, Slope

    targets = [float(target) for _, target in Slope(VALIDATION_SAMPLES, 2)]
    assert found["Reducing"]["validation"][0]["largest"] == pytest.approx(max(targets))
    several = found["SeveralNumbers"]
    assert all(metrics["losses"] == pytest.approx(metrics["loss"]) for metrics in several["all"])
    assert several["validation"][0]["doubled"] == pytest.approx(2 * sum(targets) / len(targets))
    assert isinstance(several["validation"][0]["outputs"], float)


def test_a_checkpoint_lies_where_determined_puts_it_and_hooks_are_called_once_each(
    ranks: Ranks, found: Any, home: Path
) -> None:
    """``test_checkpointing_and_restoring``, ``test_callbacks``: by its path and its uuid, from an AttrDict's engine.

    A training workload ends at each report, not at the end of an epoch too.
    """
    [uuid], folder = found["Replicated"]["uuids"], home / "Replicated"
    assert (folder / "determined" / uuid).is_dir()
    for given in (str(folder / "determined" / uuid), uuid):
        again = ranks.run(run, "Replicated", folder, latest_checkpoint=given, epochs=4)[0]
        assert len(again["training"]) == 8 - BATCHES, "it continues where the checkpoint was made"
    twice = {"training_workload_end": 2}  # two batches an epoch, each reported
    assert again["called"] == dict.fromkeys(again["called"], 1) | twice
    # ``test_restore_invalid_checkpoint``: refused in the same words on every rank
    said = {each["error"] for each in ranks.run(run, "TwoEngines", folder, latest_checkpoint=uuid)}
    assert ["it holds 1 engine, and this trial has 2" in each for each in said] == [True]


MISTAKES = {
    "LeavingOut": "stopped after 3 of 4 micro-batches",
    "OwnLoadersUnsaid": "call context.disable_dataset_reproducibility_checks() in __init__",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_refused_by_its_place(one_rank: Ranks, kind: str, tmp_path: Path) -> None:
    """``test_fail_manual_grad_acc_metrics`` and ``test_fail_dataset_repro_check``."""
    assert MISTAKES[kind] in one_rank.run(run, kind, tmp_path)[0]["error"]
