"""A weight that the ends of a pipeline share is written once, and what cannot be cut is resumed all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from determined.pytorch import Batch

from determined_ds import PipelineTrial, Trainer, open_context
from tests.harness.ranks import Ranks
from tests.package import tensors


class Ends(torch.nn.Linear):
    """The first and the last layer, which share the weight and not the bias."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        torch.nn.init.eye_(self.weight)
        torch.nn.init.zeros_(self.bias)


class Tied(PipelineTrial):
    partition_method = "uniform"

    def prepare(self) -> None:
        inputs = torch.linspace(-1, 1, 128).view(32, 4)
        self.data, self.losses = torch.utils.data.TensorDataset(inputs, torch.ones(32, 4)), list[float]()

    def build_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        ends = [TiedLayerSpec("ends", Ends, tied_weight_attr="weight") for _ in range(2)]
        return [ends[0], *(LayerSpec(torch.nn.LayerNorm, 4) for _ in range(6)), ends[1]]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, targets)

    def on_step_end(self, batch_idx: int, metrics: Any) -> None:
        self.losses.append(float(metrics["loss"]))

    def build_training_data_loader(self) -> Any:
        return self.training_loader(self.data)

    def build_validation_data_loader(self) -> Any:
        return self.validation_loader(self.data)


def train(run_dir: str, schedule: str, ranks: int, steps: int, resume: str | None = None) -> list[float]:
    """The losses of the steps, with a checkpoint after the last."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
    hparams = {"global_batch_size": 8, "micro_batch_size": 1, "deepspeed_config": {"optimizer": optimizer}}
    hparams |= {"pipe_parallel_size": ranks, "pipe_schedule": schedule}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = Tied(context)
        Trainer(trial, context).fit(max_length=Batch(steps), latest_checkpoint=resume)
        return trial.losses


def test_a_stage_without_a_tied_layer_learns_what_is_against_its_slices(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    """Of four stages, two have no part of the layer whose bias two others hold with values of their own."""
    whole, *_ = four_ranks.run(train, str(tmp_path / "whole"), "1f1b", 4, 6)
    four_ranks.run(train, str(tmp_path / "half"), "1f1b", 4, 3)
    [checkpoint] = (tmp_path / "half" / "checkpoints").iterdir()
    assert not list(checkpoint.glob("model0/*.safetensors"))
    more, *_ = four_ranks.run(train, str(tmp_path / "half"), "1f1b", 4, 6, checkpoint.name)
    assert more == whole[3:]


def test_a_tied_layer_on_one_rank_is_written_as_slices(two_ranks: Ranks, tmp_path: Path) -> None:
    """The first and the last part of dualpipev are on rank 0."""
    two_ranks.run(train, str(tmp_path), "dualpipev", 2, 2)
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("model0/*.safetensors"))) == 2
    layers = [int(name.split(".")[0]) for name, state in tensors(checkpoint) if state == "exp_avg"]
    assert layers == sorted(layers), "in the order of the layers, whichever ranks hold them"
    assert "pipeline stages share" not in two_ranks.said(0), "training keeps a shared weight the same"
