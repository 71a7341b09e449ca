"""``partition_method: measured``: layers are shared out by their times, which leaves no other trace in a training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.errors import ConfigError
from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.partition import LayerTime
from determined_ds.protocol.layer_shares import Partition, read_partition
from tests.ranks import Ranks

STAGES, MICRO_BATCHES = 2, 4
QUICK, SLOW = 0.001, 0.012
HEAVY_END = (QUICK, QUICK, QUICK, SLOW)  # by parameters, or by number, two layers a stage
DATA = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.ones(3)) for i in range(16)]


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(torch.nn.Linear):
    """A layer that takes ``seconds`` forward, and as many backward; its weights and its dropout are random."""

    def __init__(self, seconds: float) -> None:
        super().__init__(3, 3)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(super().forward(inputs), 0.2, self.training)
        return Sleep.apply(dropped, self.seconds)


def trained(run_dir: Path, seconds: tuple[float, ...], **hyperparameters: Any) -> dict[str, Any]:
    """In a rank: what a pipeline of such layers is cut into, and the mean losses of its steps."""
    from deepspeed.pipe import LayerSpec
    from determined.pytorch import Batch

    from determined_ds import PipelineTrial, Trainer, open_context

    resumed_from = hyperparameters.pop("resumed_from", None)
    losses = []

    class Piped(PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [LayerSpec(Slow, own) for own in seconds]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

        def build_training_data_loader(self) -> Any:
            return self.training_loader(DATA)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(DATA)

        def train_batch(self, *args: Any) -> dict[str, Any]:
            metrics = super().train_batch(*args)
            losses.append(float(metrics["loss"]))
            return metrics

    hparams = {
        "global_batch_size": 2 * MICRO_BATCHES,
        "pipe_parallel_size": STAGES,
        "learning_rate": 0.1,
        "deepspeed_config": {"optimizer": {"type": "AdamW"}},
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES},
        **hyperparameters,
    }
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        context.resumed_from = resumed_from
        trial = Piped(context)
        cut = [int(bound) for bound in trial.engine.module.parts]
        Trainer(trial, context).fit(
            max_length=Batch(2), checkpoint_policy="none", latest_checkpoint=resumed_from
        )
    return {"cut": cut, "losses": losses}


def only_checkpoint(run_dir: Path) -> Path:
    (found,) = (run_dir / "checkpoints").iterdir()
    return found


def test_a_stage_of_slow_layers_gets_few_and_a_resumed_run_is_cut_as_before(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """The second stage's slow layer takes as long as all others."""
    run_dir = tmp_path / "run"
    first = two_ranks.run(trained, run_dir, HEAVY_END, partition_method="measured")
    assert [rank["cut"] for rank in first] == [[0, 3, 4]] * 2

    checkpoint = only_checkpoint(run_dir)
    stored = read_partition((checkpoint / "partition.json").read_text())
    assert stored == read_partition((run_dir / "partition.json").read_text())
    assert stored is not None
    assert stored.by_parameters == (0, 2, 4)
    assert "partition.json" in json.loads((checkpoint / "manifest.json").read_text())["files"]

    # Layers that have become quick: what was measured before still holds.
    again = two_ranks.run(
        trained, tmp_path / "again", (QUICK,) * 4, partition_method="measured", resumed_from=str(checkpoint)
    )
    assert [rank["cut"] for rank in again] == [[0, 3, 4]] * 2


def test_measuring_changes_no_number_of_the_training(two_ranks: Ranks, tmp_path: Path) -> None:
    """Weights and dropout are drawn as without it; equal layers are cut as by number."""
    equal = (SLOW,) * 4
    by_time, by_number = (
        two_ranks.run(trained, tmp_path / method, equal, partition_method=method)
        for method in ("measured", "uniform")
    )
    assert by_time[0]["cut"] == [0, 2, 4]
    assert by_time == by_number


@pytest.mark.parametrize(
    ("schedule", "cut"), [("interleaved", [0, 1, 2, 3, 4]), ("zb-h1", [0, 3, 4]), ("gpipe", [0, 3, 4])]
)
@pytest.mark.long("1f1b is the one that runs always")
def test_every_schedule_is_cut_by_times(
    schedule: str, cut: list[int], two_ranks: Ranks, tmp_path: Path
) -> None:
    found = two_ranks.run(trained, tmp_path, HEAVY_END, partition_method="measured", pipe_schedule=schedule)
    assert [rank["cut"] for rank in found] == [cut] * 2


def by_type(run_dir: Path) -> list[int]:
    return list(trained(run_dir, HEAVY_END, partition_method="type:Slow")["cut"])


def test_the_hyperparameter_overrides_the_trials_attribute(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(by_type, tmp_path) == [[0, 2, 4]] * 2


def test_layers_shared_by_ranks_are_not_measured() -> None:
    from types import SimpleNamespace

    from determined_ds.trial.measured_partition import measured_partition

    pipe = Pipeline(schedule="1f1b", ranks=2, micro_batches=4)
    for context, model in ((SimpleNamespace(), 1), (SimpleNamespace(keep_partition=print), 2)):
        topology = SimpleNamespace(model_parallel_size=model)
        trial = SimpleNamespace(context=context, resolved=SimpleNamespace(topology=topology))
        with pytest.raises(ConfigError, match="partition_method"):
            measured_partition(trial, [], pipe, print)


def test_a_partition_is_read_as_it_was_written() -> None:
    layers = tuple(
        LayerTime(name=name, parameters=1, forward_s=0.1, backward_s=0.2) for name in ("A", "B", "B")
    )
    pipe = Pipeline(schedule="1f1b", ranks=2, micro_batches=4)
    found = Partition(pipe=pipe, layers=layers, bounds=(0, 1, 3), by_parameters=(0, 2, 3))
    assert read_partition(found.text()) == found
    assert found.is_of(["A", "B", "B"], pipe)
    assert not found.is_of(["A", "B", "C"], pipe)
    assert not found.is_of(["A", "B", "B"], Pipeline(schedule="1f1b", ranks=3, micro_batches=4))
    assert found.times(["A", "B", "B"]) == layers
    for text in ("", "{}", "[]", "{", '{"pipe": {}}'):
        assert read_partition(text) is None
