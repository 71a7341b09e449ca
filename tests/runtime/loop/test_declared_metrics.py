"""``validation_metrics``: how the values of batches become one, and metrics over all predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined.pytorch import Reducer

from determined_ds.errors import TrainingError, TrialError
from determined_ds.runtime.loop.declared_metrics import DeclaredMetrics
from determined_ds.runtime.loop.step_end import StepEnd, mean_of


def gathering(*others: Any) -> Any:
    return SimpleNamespace(rank=0, broadcast=lambda value: value, gather=lambda own: [own, *others])


def declared(metrics: Any, *, in_batches: bool = True) -> DeclaredMetrics:
    return DeclaredMetrics(type("Mine", (), {"validation_metrics": metrics})(), in_batches=in_batches)


def joined(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"scores": scores, "labels": labels}


class Updated:
    """As one of torchmetrics."""

    sync_on_compute = True
    seen: Any = None

    def reset(self) -> None:
        self.seen = []

    def update(self, scores: torch.Tensor) -> None:
        self.seen.append(scores)

    def compute(self) -> torch.Tensor:
        assert not self.sync_on_compute, "it would wait for ranks that compute nothing"
        return torch.cat(self.seen).sum()


def test_predictions_of_all_ranks_come_in_the_order_of_the_data() -> None:
    """Batches alternate between replicas; what pads a rank does not count; dtypes stay, but bfloat16."""
    metrics = declared({"all": joined, "updated": Updated(), "validation_loss": "sum"})
    other = [(0, 1, {"all": [torch.tensor([2.0]), torch.tensor([20])], "updated": [torch.tensor([2.0])]})]
    for index, value in ((0, 1), (1, 3), (2, 9)):
        rows = torch.tensor([float(value)], dtype=torch.bfloat16, requires_grad=True)
        reported = {"all": (rows, torch.tensor([10 * value])), "updated": rows, "validation_loss": 1.0}
        assert metrics.take(reported, index, counts=value != 9) == {"validation_loss": 1.0}
    found = metrics.compute(gathering(other), 0)
    assert found == {"all": {"scores": [1.0, 2.0, 3.0], "labels": [10, 20, 30]}, "updated": 6.0}
    assert metrics.reducers == {"validation_loss": Reducer.SUM}
    assert metrics.compute(gathering(), 0) == {}, "the next validation begins anew"


def test_arguments_by_name() -> None:
    metrics = declared({"all": joined})
    for index in range(2):
        rows = torch.tensor([index])
        metrics.take({"all": {"labels": rows + 10, "scores": rows}}, index, counts=True)
    assert metrics.compute(gathering(), 0)["all"] == {"scores": [0, 1], "labels": [10, 11]}


def test_names_alone_declare_no_reduction() -> None:
    metrics = declared(("validation_loss",))
    reported = {"validation_loss": 1.0}
    assert metrics.take(reported, 0, counts=True) is reported
    assert metrics.with_reducers(Reducer.MAX) == Reducer.MAX


def test_reductions_join_those_of_evaluation_reducer() -> None:
    metrics = declared({"errors": "sum", "worst": Reducer.MAX})
    assert metrics.with_reducers(Reducer.AVG) == {"errors": Reducer.SUM, "worst": Reducer.MAX}
    assert metrics.with_reducers({"least": Reducer.MIN}).keys() == {"errors", "worst", "least"}
    with pytest.raises(TrialError, match="without evaluation_reducer"):
        metrics.with_reducers(Reducer.SUM)


@pytest.mark.parametrize(("how", "in_batches"), [("median", True), (3, True), (joined, False)])
def test_what_cannot_be_declared(how: Any, in_batches: bool) -> None:
    with pytest.raises(TrialError, match=r"Mine\.validation_metrics"):
        declared({"mine": how}, in_batches=in_batches)


def test_what_is_not_a_row_for_each_prediction_is_refused() -> None:
    for value in (torch.tensor(1.0), 3.0, "text"):
        with pytest.raises(TrainingError, match="a row for each"):
            declared({"all": joined}).take({"all": value}, 0, counts=True)


def test_rows_that_do_not_join_are_refused_on_all_ranks() -> None:
    metrics = declared({"all": joined})
    for width in (1, 2):
        metrics.take({"all": (torch.ones(1, width), torch.ones(1))}, width, counts=True)
    with pytest.raises(TrainingError, match="cannot be joined over batches"):
        metrics.compute(gathering(), 0)


def test_a_misspelled_name_is_refused() -> None:
    with pytest.raises(TrainingError, match="'validation_acu', which is not reported"):
        declared({"validation_acu": "mean"}).check_reported({"validation_auc": 1.0})


def test_the_step_s_metrics_are_means_over_micro_batches() -> None:
    seen: list[Any] = []
    callback = SimpleNamespace(on_step_end=lambda batch, metrics: seen.append((batch, metrics)))
    loss = torch.tensor(1.0, requires_grad=True)
    step_end = StepEnd(object(), [object(), callback])
    for metrics in ({"loss": loss, "hits": 1}, {"loss": loss * 3, "hits": 2}):
        step_end.take(metrics)
    step_end.call(4)
    assert seen == [(4, {"loss": torch.tensor(2.0), "hits": 1.5})]
    assert not seen[0][1]["loss"].requires_grad
    assert mean_of([]) == {}


def test_a_test_validates_some_batches_for_a_metric_over_all_predictions() -> None:
    """An AUC of one batch, which may have one class alone, would be NaN."""
    assert declared({"auc": joined}).test_batches > 1
    assert declared({"errors": "sum"}).test_batches == declared(()).test_batches == 1
