"""What Determined's tests say of its own DeepSpeed trials, on one rank and on two.

Source: ``harness/tests/experiment/integrations/test_deepspeed_trial.py`` of determined 0.38.1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks

BATCHES = 6


@pytest.fixture(params=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


def run(kind: str, home: Path, **fit: Any) -> dict[str, Any]:
    """In a rank: train a trial of ``trials`` without hyperparameters. What its callback was handed, or the error."""
    from determined.pytorch import Batch, Epoch

    from determined_ds import DeterminedDSError
    from determined_ds import deepspeed as det_ds
    from tests.dropin import trials

    os.environ["XDG_DATA_HOME"] = str(home)
    epochs = fit.pop("epochs", None)
    length = Batch(BATCHES) if epochs is None else Epoch(epochs)
    try:
        with det_ds.init() as context:
            trial = getattr(trials, kind)(context)
            det_ds.Trainer(trial, context).fit(
                max_length=length, reporting_period=Batch(1), validation_period=Batch(BATCHES), **fit
            )
            batch = context.resolved.batch
    except DeterminedDSError as error:
        return {"error": type(error).__name__, "said": str(error)}
    kept = trial.kept
    training = [metrics["loss"] for metrics in kept.training if "loss" in metrics]
    return {
        "training": training,
        "all": kept.training,
        "validation": kept.validation,
        "uuids": kept.uuids,
        "called": kept.called,
        "sizes": (batch.global_batch_size, batch.micro_batch_size, batch.accumulation, batch.replicas),
    }


def first(ranks: Ranks, kind: str, home: Path, **fit: Any) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(run, kind, home, **fit)[0]
    return found


def error(ranks: Ranks, kind: str, home: Path, **fit: Any) -> str:
    """What is said where a trial is refused, on every rank."""
    said = {(found["error"], found["said"]) for found in ranks.run(run, kind, home, **fit)}
    assert len(said) == 1, said
    return " ".join(*said)


def learns(found: dict[str, Any]) -> bool:
    """Whether the last pass over the two batches has smaller losses than the first."""
    losses = found["training"]
    return losses[-2] < losses[0] and losses[-1] < losses[1]


# ------------------------------------------------------------------------------------------------ it trains


def test_a_trial_trains_by_the_configuration_of_its_engine(ranks: Ranks, tmp_path: Path) -> None:
    """``test_linear_model``: nothing is stated beside it."""
    found = first(ranks, "Replicated", tmp_path)
    assert found["sizes"] == (16, 4, 4 // ranks.size, ranks.size)
    assert learns(found)
    (metrics,) = found["validation"]
    assert 0 < metrics["validation_loss"] < max(found["training"])


def test_gradients_accumulated_by_hand_are_those_of_the_loop(ranks: Ranks, tmp_path: Path) -> None:
    """``test_manual_grad_acc_metrics``."""
    by_hand, by_loop = (first(ranks, kind, tmp_path) for kind in ("Accumulating", "Replicated"))
    assert by_hand["training"] == pytest.approx(by_loop["training"], rel=1e-6)


def test_a_pipeline_trains(ranks: Ranks, tmp_path: Path) -> None:
    """``test_linear_pipeline_model``; its layout is the engine's."""
    found = first(ranks, "Piped", tmp_path)
    assert found["sizes"] == (16, 4, 4 // ranks.size, ranks.size)
    assert learns(found)


def test_two_engines_train(ranks: Ranks, tmp_path: Path) -> None:
    """``test_two_model_engines``."""
    found = first(ranks, "TwoEngines", tmp_path)
    assert all(metrics["loss1"] == metrics["loss2"] for metrics in found["all"])
    assert found["validation"][0]["loss1"] == found["validation"][0]["loss2"] < found["all"][0]["loss1"]


def test_loaders_of_ones_own_are_used_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    """``test_custom_dataloader``: also one that never ends, whose length is a pass."""
    found = first(ranks, "OwnLoaders", tmp_path)
    assert learns(found)
    assert len(found["validation"]) == 1


def test_hooks_are_called_once_each(ranks: Ranks, tmp_path: Path) -> None:
    """``test_callbacks``: a training workload ends at each report, not at the end of an epoch too."""
    assert first(ranks, "Replicated", tmp_path, epochs=2)["called"] == {
        "trial_startup": 1,
        "training_start": 1,
        "training_epoch_start": 2,
        "training_epoch_end": 2,
        "training_workload_end": 4,  # two batches an epoch, each reported
        "validation_start": 1,
        "validation_end": 1,
        "checkpoint_write_end": 1,
        "checkpoint_upload_end": 1,
        "trial_shutdown": 1,
    }


# ------------------------------------------------------------------------------------------------ metrics


def test_a_reducer_sees_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """``test_custom_reducer``."""
    from tests.dropin.trials import VALIDATION_SAMPLES, Slope

    expected = max(float(target) for _, target in Slope(VALIDATION_SAMPLES, 2))
    assert first(ranks, "Reducing", tmp_path)["validation"][0]["largest"] == pytest.approx(expected)


def test_a_metric_of_several_numbers_is_their_mean(ranks: Ranks, tmp_path: Path) -> None:
    """``test_linear_non_scalar_metrics``: a list of arrays, tensors of several elements."""
    from tests.dropin.trials import VALIDATION_SAMPLES, Slope

    found = first(ranks, "SeveralNumbers", tmp_path)
    assert all(metrics["losses"] == pytest.approx(metrics["loss"]) for metrics in found["all"])
    targets = [2 * float(target) for _, target in Slope(VALIDATION_SAMPLES, 2)]
    assert found["validation"][0]["doubled"] == pytest.approx(sum(targets) / len(targets))
    assert isinstance(found["validation"][0]["outputs"], float)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("LeavingOut", "stopped after 3 of 4 micro-batches"),
        ("OwnLoadersUnsaid", "call context.disable_dataset_reproducibility_checks() in __init__"),
        ("TrainsToPairs", "TrainsToPairs.train_batch"),
        ("EvaluatesToPairs", "EvaluatesToPairs.evaluate_batch"),
    ],
)
def test_a_mistake_is_refused_by_its_place(one_rank: Ranks, kind: str, said: str, tmp_path: Path) -> None:
    """As ``test_fail_manual_grad_acc_metrics``, ``test_fail_dataset_repro_check`` and the invalid metrics do."""
    assert said in error(one_rank, kind, tmp_path)


# ------------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_lies_where_determined_puts_it(ranks: Ranks, tmp_path: Path) -> None:
    """``test_checkpointing_and_restoring``: by its path, and by its uuid; an AttrDict configured its engine."""
    (uuid,) = first(ranks, "Replicated", tmp_path)["uuids"]
    path = tmp_path / "determined" / uuid
    assert path.is_dir()
    for given in (str(path), uuid):
        again = first(ranks, "Replicated", tmp_path, latest_checkpoint=given, epochs=4)
        assert len(again["training"]) == 8 - BATCHES, "it continues where the checkpoint was made"


def test_a_checkpoint_of_other_engines_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """``test_restore_invalid_checkpoint``."""
    (uuid,) = first(ranks, "Replicated", tmp_path)["uuids"]
    assert "it holds 1 engine, and this trial has 2" in error(
        ranks, "TwoEngines", tmp_path, latest_checkpoint=uuid
    )
