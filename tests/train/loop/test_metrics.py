"""A reported metric is what it would be over all samples of all ranks at once, however it is declared and reduced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from determined import pytorch
from determined.pytorch import Reducer

from tests.harness.ranks import Ranks
from tests.package import records
from tests.train.small import fit, hyperparameters, linear_trial

SEVERAL: list[list[Any]] = [  # of two batches each: values of several numbers
    [[1.0, 2.0], [3.0, 6.0]],
    [np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[0.0, 1.0], [1.0, 1.0]])],
    [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)],
    [[True, False, False], [True, True, False]],
]


def joined(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"scores": scores, "labels": labels}


def good(rows: torch.Tensor) -> dict[str, Any]:
    return {
        "all": (rows.to(torch.bfloat16), (10 * rows).long()),
        "hits": 1.0,
        "worst": rows.max(),
        "mean": rows.mean(),
    }


DECLARED: dict[str, Any] = {"all": joined, "hits": "sum", "worst": Reducer.MAX}


def several_numbers(rows: torch.Tensor) -> dict[str, Any]:
    return {
        f"{kind.name} {at}": SEVERAL[at][int(rows[0]) // 2] for at in range(len(SEVERAL)) for kind in Reducer
    }


def validate(
    run_dir: Path, evaluate: Any, metrics: dict[str, Any], reducer: Any = Reducer.AVG, count: int = 5
) -> str:
    """In a rank: validate the numbers below ``count``, two a batch, by a function of a batch; what is refused."""
    from determined_ds.errors import DeterminedDSError

    class Mine(linear_trial()):  # type: ignore[misc]
        validation_metrics = metrics

        def build_validation_data_loader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.arange(float(count)))
            return pytorch.DataLoader(data, batch_size=2)

        def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
            return dict(evaluate(batch[0]))

        def evaluation_reducer(self) -> Any:
            return reducer

    try:
        fit(run_dir, Mine, max_length=("batches", 1))
    except DeterminedDSError as error:
        return str(error)
    return ""


def test_declared_metrics_are_those_of_all_predictions_in_the_order_of_the_data(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Batches alternate between the ranks, and what pads a rank does not count; dtypes stay, but bfloat16."""
    assert two_ranks.run(validate, tmp_path, good, DECLARED) == ["", ""]
    [(_, report)] = records(tmp_path, "validation")
    assert report["all"] == {"scores": [0.0, 1.0, 2.0, 3.0, 4.0], "labels": [0, 10, 20, 30, 40]}
    assert [report[name] for name in ("hits", "worst", "mean")] == [3.0, 4.0, 2.0]


def test_several_numbers_become_one_as_in_determineds_validation(two_ranks: Ranks, tmp_path: Path) -> None:
    """Held against the function that reduces the metrics of Determined's DeepSpeedTrials."""
    reducers = {f"{kind.name} {at}": kind for at in range(len(SEVERAL)) for kind in Reducer}
    assert two_ranks.run(validate, tmp_path, several_numbers, {}, reducers, 4) == ["", ""]
    [(_, report)] = records(tmp_path, "validation")
    for at, values in enumerate(SEVERAL):
        batches = pytorch._convert_metrics_to_numpy({str(i): value for i, value in enumerate(values)})
        for kind in Reducer:
            each = [{"metric": batch} for batch in batches.values()]
            rank: Any = SimpleNamespace(rank=0, size=1)  # all that is asked of it
            theirs = pytorch._reduce_metrics(rank, each, {"metric"}, {"metric": kind})
            assert report[f"{kind.name} {at}"] == pytest.approx(float(theirs["metric"]))


def train(run_dir: Path) -> tuple[list[Any], list[str]]:
    """In a rank: metrics of every kind, some of one rank alone; what a step ends with, and what is refused."""
    from determined_ds import TrainingError

    ends: list[Any] = []

    class Mine(linear_trial()):  # type: ignore[misc]
        odd: Any = None

        def prepare(self) -> None:
            super().prepare()
            self.micro = 0
            self.reduced: Any = {"half": torch.tensor(0.5, dtype=torch.bfloat16), "n": np.array([1, 2])}
            self.plain = self.context.wrap_reducer(lambda lists: self.reduced)

        def loss(self, model: Any, batch: Any) -> Any:
            self.micro += 1
            rank, step = self.context.distributed.rank, (self.micro + 1) // 2
            by_class = torch.tensor([rank, 3.0])
            metrics = {"rank": rank, "hits": self.micro % 2, "by_class": by_class, "step": np.float32(step)}
            if rank == 1 and step > 1:
                metrics["late"] = torch.tensor(8.0 + self.micro % 2)
            if self.odd is not None:
                metrics["accuracy"] = self.odd
            return {"loss": super().loss(model, batch), **metrics}

        def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
            return {"validation_loss": super().loss(model, batch)}

        def on_step_end(self, batch_idx: int, metrics: dict[str, Any]) -> None:
            ends.append((batch_idx, float(metrics["hits"]), metrics["loss"].requires_grad))

    how: dict[str, Any] = {
        "reporting_period": ("batches", 2),
        "hparams": hyperparameters(gradient_accumulation_steps=2),
    }
    fit(run_dir, Mine, max_length=("batches", 4), **how)
    refused, found = [], list(ends)
    for value in (torch.ones(0), "0.5", {"road": 1.0}):
        with pytest.raises(TrainingError) as error:
            fit(None, type("Mine", (Mine,), {"odd": value}), max_length=("batches", 1), **how)
        refused.append(str(error.value))
    return found, refused


def test_metrics_of_training_are_means_over_the_batches_and_ranks_that_have_them(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Every report begins anew; a name may come later, and on one rank alone."""
    for ends, refused in two_ranks.run(train, tmp_path):
        assert ends == [(batch, 0.5, False) for batch in range(4)]  # of two micro-batches
        assert all("accuracy" in each for each in refused)
    same = {"rank": 0.5, "hits": 0.5, "by_class": 1.75, "late": 8.5, "half": 0.5, "n": [1, 2]}
    for (_, report), step in zip(records(tmp_path, "training"), (1.5, 3.5), strict=True):
        assert {name: report[name] for name in (*same, "step")} == {**same, "step": step}
