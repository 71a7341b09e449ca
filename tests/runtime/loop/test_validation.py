"""A validation metric is the one over all samples, each counted once, whatever the ranks and the micro-batch.

The model is the identity and a sample is its own number, so that the mean over samples is known by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import Ranks

MICRO_BATCH_SIZE = 2
ACCUMULATION = 4
# Below one micro-batch up to more than two full calls of a pipeline, every remainder included.
SIZES = tuple(range(1, 20))


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        number = torch.tensor([float(index)])
        return number, number


def hyperparameters(kind: str) -> dict[str, Any]:
    stages = 2 if kind == "pipeline" else 1
    return {
        "global_batch_size": MICRO_BATCH_SIZE * ACCUMULATION * 2 // stages,
        "pipe_parallel_size": stages,
        "deepspeed_config": {
            "gradient_accumulation_steps": ACCUMULATION,
            "zero_optimization": {"stage": int(kind) if kind.isdigit() else 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        },
    }


@contextlib.contextmanager
def opened(kind: str, run_dir: Path | None = None, **more: Any) -> Iterator[Any]:
    from determined_ds import open_context

    with open_context(
        hparams={**hyperparameters(kind), **more},
        exp_conf={"searcher": {"name": "single", "metric": "validation_loss"}},
        run_dir=run_dir,
        accelerator="cpu",
        enable_tensorboard_logging=False,
    ) as context:
        yield context


def identity() -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


def trial_classes() -> dict[str, Any]:
    """The trials, made where deepspeed is loaded: in a rank."""
    from determined.pytorch import Reducer

    from determined_ds import DataParallelTrial, PipelineTrial

    class Shared:
        """Data of any size, and a reducer that keeps every sample it is shown."""

        size = 1
        streamed = False
        context: Any
        training_loader: Any
        validation_loader: Any

        def prepare(self) -> None:
            self.seen = self.context.wrap_reducer(sorted_numbers, name="seen")

        def build_training_data_loader(self) -> Any:
            return self.training_loader(Numbers(64), shuffle=False)

        def build_validation_data_loader(self) -> Any:
            data = Numbers(self.size)
            return self.validation_loader(
                (lambda: (data[i] for i in range(len(data)))) if self.streamed else data
            )

    class Replicated(Shared, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(identity(), identity())

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            self.seen.update(batch[1].flatten().tolist())
            return model(batch[0]).mean()

    class Summed(Replicated):
        """Reports how many samples it saw, to be added up, and the largest."""

        def evaluation_reducer(self) -> Any:
            return {"count": Reducer.SUM, "largest": Reducer.MAX}

        def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
            outputs = model(batch[0])
            return {"count": len(outputs), "largest": outputs.max(), "mean": outputs.mean()}

    class Piped(Shared, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [identity(), identity()]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            self.seen.update(targets.flatten().tolist())
            return outputs.mean()

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            return {**super().evaluate_batch(dataloader_iter, batch_idx), "calls": 1}

        def evaluation_reducer(self) -> Any:
            return {"calls": Reducer.SUM}

    class Whole(Replicated):
        """Validates on the chief, the whole of the data."""

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            numbers = [number for batch in data_loader for number in batch[0].flatten().tolist()]
            return {"validation_loss": sum(numbers) / len(numbers), "numbers": numbers}

    return {"replicated": Replicated, "summed": Summed, "piped": Piped, "whole": Whole}


def sorted_numbers(lists: list[list[float]]) -> list[float]:
    return sorted(number for numbers in lists for number in numbers)


# ------------------------------------------------------------------------------- every size, every strategy


def validate(kind: str, name: str, sizes: tuple[int, ...], streamed: bool = False) -> list[dict[str, Any]]:
    """The metrics of a validation of each size, one engine for all of them."""
    from determined_ds.runtime.loop.validation import Validator

    results = []
    with opened(kind) as context:
        trial = trial_classes()[name](context)
        trial.streamed = streamed
        for size in sizes:
            trial.size = size
            results.append(Validator(trial, context).run([]))
    return results


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["0", "3", "pipeline"])
def test_every_sample_counts_once(two_ranks: Ranks, kind: str, streamed: bool) -> None:
    """With 1 to 19 samples: on one rank fewer batches than on the other, and smaller last ones, or none.

    Of a stream nobody knows how many there are, until it ends.
    """
    name = "piped" if kind == "pipeline" else "replicated"
    first, second = two_ranks.run(validate, kind, name, SIZES, streamed)
    assert first == second, "every rank knows the metrics"
    for size, metrics in zip(SIZES, first, strict=True):
        assert metrics["validation_loss"] == pytest.approx((size - 1) / 2), size
        assert metrics["seen"] == [float(number) for number in range(size)], size


@pytest.mark.parametrize("streamed", [False, True])
def test_a_pipeline_overlaps_as_many_micro_batches_as_in_training(two_ranks: Ranks, streamed: bool) -> None:
    """Only a smaller last micro-batch goes by itself; and ranks of one replica count it once."""
    sizes = (8, 16, 10, 9)  # micro-batches: 4; 4 + 4; 4 + 1; 4 + a smaller one
    results = two_ranks.run(validate, "pipeline", "piped", sizes, streamed)[0]
    assert [metrics["calls"] for metrics in results] == [1, 2, 2, 2]


@pytest.mark.parametrize("kind", ["0", "3"])
def test_other_reducers_than_the_mean(two_ranks: Ranks, kind: str) -> None:
    for metrics, size in zip(two_ranks.run(validate, kind, "summed", (1, 5, 9))[1], (1, 5, 9), strict=True):
        expected = {"count": size, "largest": size - 1, "mean": pytest.approx((size - 1) / 2), "seen": []}
        assert metrics == expected


# ----------------------------------------------------------------------------- in the middle of training


def train_and_validate(kind: str, name: str, run_dir: Path) -> None:
    from determined.pytorch import Batch

    from determined_ds import Trainer

    with opened(kind, run_dir) as context:
        trial = trial_classes()[name](context)
        trial.size = 5
        Trainer(trial, context).fit(
            max_length=Batch(4),
            reporting_period=Batch(3),
            validation_period=Batch(1),
            checkpoint_policy="none",
        )


@pytest.mark.parametrize("kind", ["0", "pipeline"])
def test_a_validation_leaves_what_reducers_hold_of_the_training_alone(
    two_ranks: Ranks, kind: str, tmp_path: Path, metrics_of: Callable[..., Any]
) -> None:
    two_ranks.run(train_and_validate, kind, "piped" if kind == "pipeline" else "replicated", tmp_path)
    size = hyperparameters(kind)["global_batch_size"]
    numbers = [float(number % 64) for number in range(4 * size)]
    reports = metrics_of(tmp_path, "training")
    assert [metrics["seen"] for metrics in reports] == [
        sorted(numbers[: 3 * size]),
        sorted(numbers[3 * size :]),
    ]
    assert [metrics["loss"] for metrics in reports] == pytest.approx(
        [sum(numbers[: 3 * size]) / (3 * size), sum(numbers[3 * size :]) / size]
    )
    validations = metrics_of(tmp_path, "validation")
    assert [metrics["seen"] for metrics in validations] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
    assert [metrics["validation_loss"] for metrics in validations] == [2.0] * 4


# ------------------------------------------------------------------------------------ the whole on the chief


@pytest.mark.parametrize("streamed", [False, True])
def test_evaluate_full_dataset_is_given_all_of_it_on_the_chief(two_ranks: Ranks, streamed: bool) -> None:
    for (metrics,) in two_ranks.run(validate, "0", "whole", (5,), streamed):
        assert metrics["validation_loss"] == 2.0
        assert metrics["numbers"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def refused(kind: str, name: str) -> str:
    from determined_ds.errors import TrainingError

    try:
        validate(kind, name, (5,))
    except TrainingError as error:
        return str(error)
    return ""


def test_evaluate_full_dataset_is_refused_where_it_would_hang(two_ranks: Ranks) -> None:
    for message in two_ranks.run(refused, "3", "whole"):
        assert "evaluate_batch" in message


# ------------------------------------------------------------------------------------- a trial's mistakes


# ---------------------------------------------------------------------------------------- the plan, by itself


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=9), min_size=1, max_size=3).filter(any), st.integers(1, 4)
)
def test_a_call_never_mixes_what_weighs_differently(sizes: list[list[int]], at_most: int) -> None:
    from determined_ds.runtime.data.shares import CallPlan

    plan = CallPlan(sizes, at_most=at_most)
    assert plan.num_batches == max(len(own) for own in sizes)
    left = plan.num_batches
    while left:
        count = plan.next(left)
        assert 1 <= count <= min(at_most, left)
        start = plan.num_batches - left
        for own in sizes:
            if own:  # a rank without a data loader weighs nothing
                padded = own + [0] * (plan.num_batches - len(own))
                assert len(set(padded[start : start + count])) == 1
        left -= count
