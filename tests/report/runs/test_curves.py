"""Metrics as curves over batches and time in training."""

from __future__ import annotations

import math
from pathlib import Path

from determined_ds.report.runs.curves import Curve, clock_of, curves_of
from determined_ds.report.runs.line_charts import charts_of
from tests.report.recorded import BEGAN, course, launch, recorded, shown, training, validation


def test_each_metric_is_a_curve_by_the_name_that_loggers_have(tmp_path: Path) -> None:
    curves = shown(recorded(tmp_path / "run", course(20))).curves
    assert list(curves) == [
        "training/loss",
        "training/lr",
        "training/samples_per_second",
        "validation/validation_loss",
    ]
    assert curves["validation/validation_loss"].steps == [10, 20]
    assert curves["validation/validation_loss"].values == [4.123456789, 3.123456789]
    assert curves["validation/validation_loss"].seconds == [10.0, 20.0]


def test_pauses_between_launches_and_lost_work_are_left_out(tmp_path: Path) -> None:
    records = [training(10), training(20, loss=1.0), training(30, time=BEGAN + 1000 + 5, loss=1.0)]
    launches = [launch(), launch(time=BEGAN + 1000, kind="resume", steps_completed=20)]
    run = shown(recorded(tmp_path / "run", records, launches=launches))
    assert run.curves["training/loss"].seconds == [20.0, 25.0]
    assert run.clock.starts == [0.0, 20.0]
    assert run.seconds == 25.0


def test_without_launches_time_begins_with_the_first_report(tmp_path: Path) -> None:
    run = shown(recorded(tmp_path / "run", [training(3, loss=1.0), training(5, loss=2.0)], launches=()))
    assert run.curves["training/loss"].seconds == [0.0, 2.0]


def test_reports_without_a_time_have_none(tmp_path: Path) -> None:
    record = {"group": "training", "steps_completed": 1, "metrics": {"loss": 1.0}}
    run = shown(recorded(tmp_path / "run", [record]))
    assert run.curves["training/loss"].seconds == [None]
    assert run.seconds is None


def test_what_is_no_number_is_left_out_and_what_is_not_finite_is_not(tmp_path: Path) -> None:
    record = training(1, loss=math.nan, top=math.inf, per_class=[1, 2], note="text", nothing=None, flag=True)
    curves = shown(recorded(tmp_path / "run", [record])).curves
    assert list(curves) == ["training/loss", "training/top", "training/flag"]
    assert math.isnan(curves["training/loss"].values[0])
    assert curves["training/top"].values == [math.inf]


def test_a_batch_that_is_reported_again_counts_once(tmp_path: Path) -> None:
    run = shown(recorded(tmp_path / "run", [training(4, loss=1.0), training(4, loss=2.0)]))
    (curve,) = curves_of(run.run, clock_of(run.run))
    assert (curve.steps, curve.values) == ([4], [2.0])


def curve(name: str) -> Curve:
    group, _, metric = name.partition("/")
    return Curve(group=group, metric=metric)


def test_a_metrics_training_and_validation_are_one_picture_and_loss_is_the_first() -> None:
    names = [
        *("training/grad_norm", "training/extra", "training/learning_rate", "training/loss"),
        *("training/peak_memory_gib", "training/peak_memory_gib_min"),
        *("validation/accuracy", "validation/val_loss", "training/train_accuracy", "validation/eval_loss"),
    ]
    charts = charts_of([[curve(name) for name in names]])
    assert [(chart.title, chart.curves) for chart in charts] == [
        ("loss", ("training/loss", "validation/val_loss", "validation/eval_loss")),
        ("accuracy", ("validation/accuracy", "training/train_accuracy")),
        ("learning rate", ("training/learning_rate",)),
        ("gradient norm", ("training/grad_norm",)),
        ("peak memory of a rank, GiB", ("training/peak_memory_gib", "training/peak_memory_gib_min")),
        ("extra", ("training/extra",)),
    ]


def test_validation_alone_is_a_picture() -> None:
    record = [validation(1, accuracy=0.5)]
    assert record
    (chart,) = charts_of([[curve("validation/accuracy")]])
    assert chart.curves == ("validation/accuracy",)
