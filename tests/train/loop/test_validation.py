"""A validation metric is the one over all samples; here a sample is its own number, and the model the identity."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed
from tests.package import checkpoints, records
from tests.train.small import fit

MICRO_BATCH_SIZE, ACCUMULATION = 2, 4
# Below one micro-batch up to more than two full calls of a pipeline.
SIZES = (*range(1, 10), 15, 16, 17, 19)


def numbers(size: int) -> list[Any]:
    return [(torch.tensor([float(index)]),) * 2 for index in range(size)]


def hyperparameters(kind: str) -> dict[str, Any]:
    stages = 2 if kind == "pipeline" else 1
    return {
        "global_batch_size": MICRO_BATCH_SIZE * ACCUMULATION * 2 // stages,
        "pipe_parallel_size": stages,
        "deepspeed_config": {
            "gradient_accumulation_steps": ACCUMULATION,
            "zero_optimization": {"stage": 3 if kind == "zero3" else 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        },
    }


def identities() -> list[torch.nn.Module]:
    found = [torch.nn.Linear(1, 1) for _ in range(2)]
    for layer in found:
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return found


def trial_class(kind: str, data: str = "indexed", fails: bool = False, whole: bool = False) -> Any:
    """A trial with data of any size and a reducer that keeps every sample it is shown; in a rank."""
    from determined.pytorch import PyTorchCallback

    from determined_ds import DataParallelTrial, PipelineTrial

    class Shared:
        size = 5
        context: Any
        training_loader: Any
        validation_loader: Any

        def prepare(self) -> None:
            self.seen = self.context.wrap_reducer(lambda lists: sorted(itertools.chain(*lists)), name="seen")
            self.validated: list[dict[str, Any]] = []

        def build_training_data_loader(self) -> Any:
            return self.training_loader(numbers(64), shuffle=False)

        def build_validation_data_loader(self) -> Any:
            found = numbers(self.size)
            if data == "torch's":
                return torch.utils.data.DataLoader(found, batch_size=MICRO_BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]
            return self.validation_loader(found.__iter__ if data == "stream" else found)

        def build_callbacks(self) -> Any:
            keeping = PyTorchCallback()
            keeping.on_validation_end = lambda metrics: self.validated.append(dict(metrics))  # type: ignore
            return {"keeping": keeping}

    class Replicated(Shared, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*identities())

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            self.seen.update(batch[1].flatten().tolist())
            return model(batch[0]).mean()

        def evaluate(self, model: Any, batch: Any) -> Any:
            if fails:
                raise ZeroDivisionError("as the test has it")
            return super().evaluate(model, batch)

    class Piped(Shared, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return identities()

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            self.seen.update(targets.flatten().tolist())
            return outputs.mean()

    class Whole(Replicated):
        """Validates on the chief, the whole of the data."""

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            found = [number for batch in data_loader for number in batch[0].flatten().tolist()]
            self.seen.update(found)
            return {"validation_loss": sum(found) / len(found)}

    return Whole if whole else Piped if kind == "pipeline" else Replicated


def validate(kind: str, data: str, whole: bool = False) -> list[dict[str, Any]]:
    """In a rank: the metrics of a validation of each size, one engine for all of them."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    with open_context(hparams=hyperparameters(kind), accelerator="cpu") as context:
        trial = trial_class(kind, data, whole=whole)(context)
        for trial.size in SIZES:
            Trainer(trial, context).fit(max_length=Batch(1), checkpoint_policy="none")
        return list(trial.validated)


@pytest.mark.parametrize(
    ("kind", "data", "whole"),
    [
        ("zero0", "indexed", False),
        ("zero0", "torch's", False),
        ("zero3", "stream", False),
        ("pipeline", "indexed", False),
        ("pipeline", "stream", False),
        ("zero0", "stream", True),
    ],
)
def test_every_sample_counts_once(two_ranks: Ranks, kind: str, data: str, whole: bool) -> None:
    """With 1 to 19 samples: on one rank fewer batches than on the other, and smaller last ones, or none."""
    first, second = two_ranks.run(validate, kind, data, whole)
    assert first == second, "every rank knows the metrics"
    for size, metrics in zip(SIZES, first, strict=True):
        assert metrics["validation_loss"] == pytest.approx((size - 1) / 2), size
        assert metrics["seen"] == [float(number) for number in range(size)], size


def test_evaluate_full_dataset_is_refused_where_it_would_hang(two_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="define evaluate_batch instead"):
        two_ranks.run(validate, "zero3", "stream", True)


def train(kind: str, run_dir: Path, fails: bool = False, **arguments: Any) -> str:
    """In a rank: train four batches; what a validation has raised."""
    how: dict[str, Any] = {"hparams": hyperparameters(kind), "max_length": ("batches", 4), **arguments}
    try:
        fit(run_dir, trial_class(kind, fails=fails), **how)
    except ZeroDivisionError as error:
        return str(error)
    return ""


def seen_in(kind: str, batches: range) -> list[float]:
    """What reducers are shown in these batches of the training."""
    size = hyperparameters(kind)["global_batch_size"]
    return sorted(float(number % 64) for number in range(batches.start * size, batches.stop * size))


@pytest.mark.parametrize("kind", ["zero0", "pipeline"])
def test_a_validation_leaves_what_reducers_hold_of_the_training_alone(
    two_ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    periods = {"reporting_period": ("batches", 3), "validation_period": ("batches", 1)}
    two_ranks.run(train, kind, tmp_path, checkpoint_policy="none", **periods)
    reports = [metrics for _, metrics in records(tmp_path, "training")]
    expected = [seen_in(kind, range(3)), seen_in(kind, range(3, 4))]
    assert [metrics["seen"] for metrics in reports] == expected
    assert [metrics["loss"] for metrics in reports] == pytest.approx([sum(e) / len(e) for e in expected])
    validations = [metrics for _, metrics in records(tmp_path, "validation")]
    assert [metrics["seen"] for metrics in validations] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
    assert [metrics["validation_loss"] for metrics in validations] == [2.0] * 4


def test_the_checkpoint_of_a_validation_that_failed_holds_what_reducers_held_of_the_training(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    periods = {"reporting_period": ("batches", 4), "validation_period": ("batches", 2)}
    assert two_ranks.run(train, "zero0", tmp_path, True, **periods) == ["as the test has it"] * 2
    [checkpoint] = checkpoints(tmp_path)
    resumed = two_ranks.run(train, "zero0", tmp_path, latest_checkpoint=checkpoint.name, **periods)
    assert resumed == ["", ""]
    [(batch, metrics)] = records(tmp_path, "training")
    assert (batch, metrics["seen"]) == (4, seen_in("zero0", range(4)))
