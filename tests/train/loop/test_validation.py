"""A validation metric is the one over all samples, each counted once, whatever the ranks and the micro-batch.

The model is the identity and a sample is its own number, so that the mean over samples is known by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed
from tests.package import checkpoints, records

MICRO_BATCH_SIZE = 2
ACCUMULATION = 4
# Below one micro-batch up to more than two full calls of a pipeline.
SIZES = (*range(1, 10), 15, 16, 17, 19)


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


def opened(kind: str, run_dir: Path | None = None) -> Any:
    from determined_ds import open_context

    return open_context(hparams=hyperparameters(kind), run_dir=run_dir, accelerator="cpu")


def identity() -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


def trial_classes() -> dict[str, Any]:
    """The trials, made where deepspeed is loaded: in a rank."""
    from determined.pytorch import PyTorchCallback

    from determined_ds import DataParallelTrial, PipelineTrial

    class Keeping(PyTorchCallback):
        def __init__(self, validated: list[dict[str, Any]]) -> None:
            self.validated = validated

        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            self.validated.append({name: metrics[name] for name in metrics.keys() - {"batches"}})

    class Shared:
        """Data of any size, and a reducer that keeps every sample it is shown."""

        size = 1
        data = "indexed"
        context: Any
        training_loader: Any
        validation_loader: Any

        def prepare(self) -> None:
            self.seen = self.context.wrap_reducer(sorted_numbers, name="seen")
            self.validated: list[dict[str, Any]] = []

        def build_training_data_loader(self) -> Any:
            return self.training_loader(Numbers(64), shuffle=False)

        def build_validation_data_loader(self) -> Any:
            data = Numbers(self.size)
            if self.data == "torch's":
                return torch.utils.data.DataLoader(data, batch_size=MICRO_BATCH_SIZE, shuffle=True)
            return self.validation_loader(
                (lambda: (data[i] for i in range(len(data)))) if self.data == "stream" else data
            )

        def build_callbacks(self) -> Any:
            return {"keeping": Keeping(self.validated)}

    class Replicated(Shared, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(identity(), identity())

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            self.seen.update(batch[1].flatten().tolist())
            return model(batch[0]).mean()

    class Piped(Shared, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [identity(), identity()]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            self.seen.update(targets.flatten().tolist())
            return outputs.mean()

    class Whole(Replicated):
        """Validates on the chief, the whole of the data."""

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            numbers = [number for batch in data_loader for number in batch[0].flatten().tolist()]
            return {"validation_loss": sum(numbers) / len(numbers), "numbers": numbers}

    return {"replicated": Replicated, "piped": Piped, "whole": Whole}


def sorted_numbers(lists: list[list[float]]) -> list[float]:
    return sorted(number for numbers in lists for number in numbers)


def validate(kind: str, name: str, sizes: tuple[int, ...], data: str = "indexed") -> list[dict[str, Any]]:
    """The metrics of a validation of each size, one engine for all of them."""
    from determined.pytorch import Batch

    from determined_ds import Trainer

    with opened(kind) as context:
        trial = trial_classes()[name](context)
        trial.data = data
        for trial.size in sizes:
            Trainer(trial, context).fit(max_length=Batch(1), checkpoint_policy="none")
        return list(trial.validated)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("0", "indexed"),
        ("0", "torch's"),
        ("3", "stream"),
        ("pipeline", "indexed"),
        ("pipeline", "stream"),
        pytest.param("3", "indexed", marks=pytest.mark.long("ZeRO 0, and ZeRO 3 on a stream, are short")),
    ],
)
def test_every_sample_counts_once(two_ranks: Ranks, kind: str, data: str) -> None:
    """With 1 to 19 samples: on one rank fewer batches than on the other, and smaller last ones, or none.

    Of a stream nobody knows how many there are, until it ends.
    """
    name = "piped" if kind == "pipeline" else "replicated"
    first, second = two_ranks.run(validate, kind, name, SIZES, data)
    assert first == second, "every rank knows the metrics"
    for size, metrics in zip(SIZES, first, strict=True):
        assert metrics["validation_loss"] == pytest.approx((size - 1) / 2), size
        assert metrics["seen"] == [float(number) for number in range(size)], size


def train_and_validate(kind: str, name: str, run_dir: Path) -> None:
    from determined.pytorch import Batch

    from determined_ds import Trainer

    with opened(kind, run_dir) as context:
        trial = trial_classes()[name](context)
        trial.size = 5
        periods = {"reporting_period": Batch(3), "validation_period": Batch(1)}
        Trainer(trial, context).fit(max_length=Batch(4), checkpoint_policy="none", **periods)


@pytest.mark.parametrize("kind", ["0", "pipeline"])
def test_a_validation_leaves_what_reducers_hold_of_the_training_alone(
    two_ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    two_ranks.run(train_and_validate, kind, "piped" if kind == "pipeline" else "replicated", tmp_path)
    size = hyperparameters(kind)["global_batch_size"]
    numbers = [float(number % 64) for number in range(4 * size)]
    reports = [metrics for _, metrics in records(tmp_path, "training")]
    assert [metrics["seen"] for metrics in reports] == [
        sorted(numbers[: 3 * size]),
        sorted(numbers[3 * size :]),
    ]
    assert [metrics["loss"] for metrics in reports] == pytest.approx(
        [sum(numbers[: 3 * size]) / (3 * size), sum(numbers[3 * size :]) / size]
    )
    validations = [metrics for _, metrics in records(tmp_path, "validation")]
    assert [metrics["seen"] for metrics in validations] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
    assert [metrics["validation_loss"] for metrics in validations] == [2.0] * 4


def train_until_it_fails(run_dir: Path, resume: str | None) -> str:
    """In a rank: train four batches; the validation after the second fails, unless it is resumed."""
    from determined.pytorch import Batch

    from determined_ds import Trainer

    class Failing(trial_classes()["replicated"]):  # type: ignore[misc]
        def evaluate(self, model: Any, batch: Any) -> Any:
            if resume is None:
                raise ZeroDivisionError("as the test has it")
            return super().evaluate(model, batch)

    with opened("0", run_dir) as context:
        trial = Failing(context)
        trial.size = 5
        periods = {"reporting_period": Batch(4), "validation_period": Batch(2)}
        try:
            Trainer(trial, context).fit(max_length=Batch(4), latest_checkpoint=resume, **periods)
        except ZeroDivisionError as error:
            return str(error)
    return ""


def test_the_checkpoint_of_a_validation_that_failed_holds_what_reducers_held_of_the_training(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    assert two_ranks.run(train_until_it_fails, tmp_path, None) == ["as the test has it"] * 2
    [checkpoint] = checkpoints(tmp_path)
    assert two_ranks.run(train_until_it_fails, tmp_path, checkpoint.name) == ["", ""]
    [(batch, metrics)] = records(tmp_path, "training")
    size = hyperparameters("0")["global_batch_size"]
    assert (batch, metrics["seen"]) == (4, sorted(float(number % 64) for number in range(4 * size)))


def test_evaluate_full_dataset_is_given_all_of_it_on_the_chief(two_ranks: Ranks) -> None:
    for (metrics,) in two_ranks.run(validate, "0", "whole", (5,), "stream"):
        assert metrics["validation_loss"] == 2.0
        assert metrics["numbers"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_evaluate_full_dataset_is_refused_where_it_would_hang(two_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="define evaluate_batch instead"):
        two_ranks.run(validate, "3", "whole", (5,))
