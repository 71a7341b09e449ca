"""A reported metric is what it would be over all samples at once, on every rank the same."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from determined import pytorch, util
from determined.pytorch import Reducer
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import TrainingError
from determined_ds.report.terminal.report_line import show
from determined_ds.runtime.loop.custom_reducers import is_same, plain
from determined_ds.runtime.loop.metric_sums import MetricSums
from tests.ranks import Ranks

CPU = torch.device("cpu")
FINITE = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.lists(FINITE, min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_mean_over_uneven_batches_is_the_mean_over_samples(batches: list[list[float]]) -> None:
    sums = MetricSums(CPU)
    for batch in batches:
        sums.add({"loss": torch.tensor(batch, dtype=torch.float64).mean()}, weight=len(batch))
    everything = [sample for batch in batches for sample in batch]
    assert sums.reduce()["loss"] == pytest.approx(np.mean(everything), rel=1e-9, abs=1e-6)


def test_each_metric_is_reduced_its_own_way() -> None:
    kinds = {"low": Reducer.MIN, "high": Reducer.MAX, "total": Reducer.SUM}
    sums = MetricSums(CPU, kinds)
    for value, weight in ((3.0, 1), (-1.0, 3), (5.0, 4)):
        sums.add(dict.fromkeys(("low", "high", "total", "mean"), value), weight)
    assert sums.reduce() == {"low": -1.0, "high": 5.0, "total": 7.0, "mean": 20.0 / 8}


@pytest.mark.parametrize("kind", list(Reducer))
def test_weight_zero_leaves_no_trace(kind: Reducer) -> None:
    sums = MetricSums(CPU, kind)
    sums.add({"loss": 2.0}, weight=1)
    for nothing in (1e9, -1e9, math.nan, math.inf):
        sums.add({"loss": nothing, "other": nothing}, weight=0)
    assert sums.reduce() == {"loss": 2.0}


def test_a_metric_that_is_not_always_there_is_the_mean_of_where_it_is() -> None:
    sums = MetricSums(CPU)
    sums.add({"loss": 1.0, "rare": 7.0}, weight=1)
    sums.add({"loss": 2.0}, weight=3)
    assert sums.reduce() == {"loss": 1.75, "rare": 7.0}


def test_every_report_starts_anew() -> None:
    sums = MetricSums(CPU, {"high": Reducer.MAX})
    sums.add({"loss": 100.0, "high": 100.0})
    sums.reduce()
    sums.add({"loss": 1.0, "high": 1.0})
    assert sums.reduce() == {"loss": 1.0, "high": 1.0}
    assert sums.reduce() == {}


def test_a_state_goes_on_where_it_was() -> None:
    sums, other = MetricSums(CPU), MetricSums(CPU)
    sums.add({"loss": 4.0}, weight=1)
    other.load_state_dict(sums.state_dict())
    other.add({"loss": 1.0}, weight=2)
    assert other.reduce() == {"loss": 2.0}


@pytest.mark.parametrize("value", [torch.ones(0), torch.ones(100_001), 1j, "0.5", None, {"road": 1.0}])
def test_what_is_not_numbers_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TrainingError, match="accuracy"):
        MetricSums(CPU).add({"accuracy": value})


@pytest.mark.parametrize("value", [1, 2.5, True, torch.tensor([3.0]), torch.tensor(4), np.float32(5)])
def test_any_number_is_a_scalar(value: Any) -> None:
    sums = MetricSums(CPU)
    sums.add({"loss": value})
    assert sums.reduce()["loss"] == float(value)


# ------------------------------------------------------------------------- of several numbers, as by Determined

SEVERAL: list[list[Any]] = [
    [[1.0, 2.0], [3.0, 6.0]],
    [(1, 2, 3), (4, 5, 7)],
    [np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[0.0, 1.0], [1.0, 1.0]])],
    [torch.tensor([1.5, -2.0]), torch.tensor([4.0, 8.0])],
    [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)],
    [[True, False, False], [True, True, False]],
]


class OneRank:
    """Of Determined's functions on metrics, all that they ask of a distributed context."""

    rank, size = 0, 1


@pytest.mark.parametrize("kind", list(Reducer))
@pytest.mark.parametrize("values", SEVERAL)
def test_several_numbers_become_one_as_in_determineds_validation(values: list[Any], kind: Reducer) -> None:
    """Held against the function that reduces the metrics of Determined's DeepSpeedTrials."""
    batches = pytorch._convert_metrics_to_numpy({str(at): value for at, value in enumerate(values)})
    theirs = pytorch._reduce_metrics(
        OneRank(),  # type: ignore[arg-type]
        [{"metric": batch} for batch in batches.values()],
        {"metric"},
        {"metric": kind},
    )
    ours = MetricSums(CPU, kind)
    for value in values:
        ours.add({"metric": value}, weight=4)
    assert ours.reduce()["metric"] == pytest.approx(float(theirs["metric"]))


@pytest.mark.parametrize("values", SEVERAL)
def test_several_numbers_become_one_as_in_determineds_training(values: list[Any]) -> None:
    theirs = util.make_metrics(None, [{"metric": np.asarray(value)} for value in values])["avg_metrics"]
    ours = MetricSums(CPU)
    for value in values:
        ours.add({"metric": value})
    assert ours.reduce() == pytest.approx(theirs)


def test_several_numbers_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    said: set[str] = set()
    for _ in range(2):
        sums = MetricSums(CPU, source="MyTrial.loss (trial.py:7)", warned=said)
        sums.add({"by_class": torch.ones(3), "loss": 1.0})
    [record] = caplog.records
    assert "MyTrial.loss (trial.py:7): metric 'by_class' has shape (3,)" in record.getMessage()
    assert "its mean over all elements" in record.getMessage()


def test_what_was_reduced_by_its_author_is_reported_as_it_is() -> None:
    """By the function that sends metrics to a master, which knows no tensors."""
    metrics = {
        "by_class": torch.tensor([0.5, 1.0]),
        "confusion": np.array([[1, 2], [3, 4]]),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "words": ["road", {"iou": torch.tensor(0.25)}],
        "none": None,
    }
    found = plain(metrics, "reducer", for_training=True)
    expected = {
        "by_class": [0.5, 1.0],
        "confusion": [[1, 2], [3, 4]],
        "half": 0.5,
        "words": ["road", {"iou": 0.25}],
        "none": None,
    }
    assert found == json.loads(util.json_encode(found)) == expected


@pytest.mark.parametrize(
    ("second", "exactly", "nearly"),
    [
        ({"loss": 2.0, "by_class": [0.5, {"road": 1}], "name": "a"}, True, True),
        ({"loss": 2.01, "by_class": [0.5, {"road": 1}], "name": "a"}, False, True),
        ({"loss": 2.0, "by_class": [0.502, {"road": 1}], "name": "a"}, False, True),
        ({"loss": 2.1, "by_class": [0.5, {"road": 1}], "name": "a"}, False, False),
        ({"loss": 2.0, "by_class": [0.5, {"road": 2}], "name": "a"}, False, False),
        ({"loss": 2.0, "by_class": [0.5], "name": "a"}, False, False),
        ({"loss": 2.0, "by_class": [0.5, {"road": 1}], "name": "b"}, False, False),
        ({"loss": float("nan"), "by_class": [0.5, {"road": 1}], "name": "a"}, False, False),
        ({"loss": 2.0}, False, False),
    ],
)
def test_a_gpu_may_add_in_another_order(second: dict[str, Any], exactly: bool, nearly: bool) -> None:
    """Counts and words are the same all the same."""
    first = {"loss": 2.0, "by_class": [0.5, {"road": 1}], "name": "a"}
    assert is_same(first, second, tolerance=0.0) is exactly
    assert is_same(first, second, tolerance=0.01) is nearly


@pytest.mark.parametrize("value", [{1, 2}, [CPU], {"a": object()}, 1j, b"bytes"])
def test_what_no_master_takes_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TrainingError, match=r"evaluate_full_dataset: metric 'odd' is"):
        plain({"odd": value}, "MyTrial.evaluate_full_dataset")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([0.5, 2], "iou [0.5 2]"),
        (list(range(100)), "iou [100 values]"),
        ([[1, 2], [3, 4]], "iou [2 values]"),
        ({"road": 0.5}, "iou {1 entries}"),
        ("x" * 100, f"iou {'x' * 37}..."),
    ],
)
def test_a_line_for_people_stays_short(value: Any, text: str) -> None:
    assert show("iou", value) == text


@pytest.mark.parametrize("kind", list(Reducer))
def test_numbers_of_the_host_are_copied_to_no_device_before_a_report(kind: Reducer) -> None:
    """The host would wait for each copy to a GPU, at every batch."""
    meta = torch.device("meta")  # which is not the host
    sums = MetricSums(meta, kind)
    for value in (0.5, 2, True, np.float32(1.5), [1.0, 2.0]):
        sums.add({"accuracy": value})
        total = sums.running("accuracy")
        assert total is not None
        assert total.device.type == "cpu"
    sums.add({"accuracy": torch.ones((), device=meta)})  # a trial may return either
    total = sums.running("accuracy")
    assert total is not None
    assert total.device == meta


# --------------------------------------------------------------------------------------------- two ranks


def reduce_over_ranks(
    added: list[list[tuple[dict[str, float], float]]], kinds: dict[str, Reducer], reports: int = 1
) -> tuple[list[dict[str, float]], int]:
    """Add this rank's metrics, reduce; what came of each report, and the collectives of the last one."""
    import torch.distributed as dist

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group

    join_process_group(detect_accelerator("cpu"))
    calls = 0
    all_reduce, all_gather = dist.all_reduce, dist.all_gather_object

    def count(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return counted

    dist.all_reduce, dist.all_gather_object = count(all_reduce), count(all_gather)
    try:
        sums = MetricSums(CPU, kinds)
        results = []
        for _ in range(reports):
            calls = 0
            for metrics, weight in added[dist.get_rank()]:
                sums.add(metrics, weight)
            results.append(sums.reduce())
    finally:
        dist.all_reduce, dist.all_gather_object = all_reduce, all_gather
    return results, calls


def test_ranks_reduce_to_the_same(two_ranks: Ranks) -> None:
    added = [
        [({"loss": 1.0, "n": 1.0, "low": 4.0, "high": 4.0}, 2.0), ({"loss": 4.0, "n": 1.0}, 1.0)],
        [({"loss": 10.0, "n": 1.0, "low": 9.0, "high": 9.0}, 3.0)],
    ]
    kinds = {"n": Reducer.SUM, "low": Reducer.MIN, "high": Reducer.MAX}
    (first, _), (second, _) = two_ranks.run(reduce_over_ranks, added, kinds)
    assert first == second == [{"loss": 36.0 / 6, "n": 3.0, "low": 4.0, "high": 9.0}]


def test_a_report_is_one_collective(two_ranks: Ranks) -> None:
    added = [[({"loss": 1.0, "accuracy": 0.5}, 1.0)], [({"loss": 3.0, "accuracy": 1.0}, 1.0)]]
    for results, calls in two_ranks.run(reduce_over_ranks, added, {}, reports=3):
        assert results == [{"loss": 2.0, "accuracy": 0.75}] * 3
        assert calls == 1


def test_several_numbers_of_several_ranks_are_one_collective_too(two_ranks: Ranks) -> None:
    """The mean of all elements, the largest of all; and no rank needs the other's shape."""
    added: list[Any] = [
        [({"iou": [1.0, 3.0], "high": [4.0, 9.0, 1.0]}, 1.0)],
        [({"iou": [5.0, 7.0], "high": [2.0]}, 1.0)],
    ]
    for results, _ in two_ranks.run(reduce_over_ranks, added, {"high": Reducer.MAX}):
        assert results == [{"iou": 4.0, "high": 9.0}]
    for _, calls in two_ranks.run(reduce_over_ranks, [[({"iou": [1.0, 2.0]}, 1.0)]] * 2, {}, reports=2):
        assert calls == 1


def test_a_rank_without_metrics_counts_for_nothing(two_ranks: Ranks) -> None:
    """A rank whose ``should_report_metrics`` is false has none; it still takes part."""
    added: list[Any] = [[], [({"loss": 3.0, "low": -1.0}, 5.0)]]
    (first, _), (second, _) = two_ranks.run(reduce_over_ranks, added, {"low": Reducer.MIN}, reports=2)
    assert first == second == [{"loss": 3.0, "low": -1.0}] * 2


def meet_another_name() -> list[dict[str, float]]:
    import torch.distributed as dist

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group

    join_process_group(detect_accelerator("cpu"))
    sums = MetricSums(CPU)
    results = []
    for report in range(3):
        metrics = {"loss": 1.0} if report == 0 or dist.get_rank() == 0 else {"loss": 1.0, "late": 8.0}
        sums.add(metrics)
        results.append(sums.reduce())
    return results


def test_a_name_may_come_later_and_on_one_rank_alone(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(meet_another_name)
    assert first == second == [{"loss": 1.0}, {"loss": 1.0, "late": 8.0}, {"loss": 1.0, "late": 8.0}]
