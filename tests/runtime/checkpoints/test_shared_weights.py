"""What ranks of a pipeline write: a weight that they share once, with a word where their values differ; in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.protocol.tensor_index import TRAINED, WEIGHT, Piece
from determined_ds.runtime.checkpoints.shards import Described, Entry, index_of
from tests.ranks import Ranks


def stage(norm: float) -> Described:
    kinds = {"0.weight": ((4,), TRAINED)}
    return Described(kinds=kinds, aliases={}, common={}, scalars={}, optimizer="", shared={"0.weight": norm})


@pytest.mark.parametrize(("norms", "is_said"), [((1.5, 1.5), False), ((1.5, 1.5000000000000002), True)])
def test_other_values_on_another_stage_are_said(
    norms: tuple[float, float], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    piece = Piece(file="rank0.safetensors", offset=8, start=0, count=4)
    entry = Entry(name="0.weight", state=WEIGHT, dtype="F32", piece=piece)
    index_of([stage(norm) for norm in norms], [entry])
    assert ("pipeline stages share 0.weight" in caplog.text) is is_said


def test_tensors_stand_in_the_order_of_the_layers_whichever_ranks_hold_them() -> None:
    ranks, entries = [], []
    for rank, layers in enumerate(([0, 3, 10], [1, 2])):
        names = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
        kinds = dict.fromkeys(names, ((1,), TRAINED))
        ranks.append(Described(kinds=kinds, aliases={}, common={}, scalars={}, optimizer="", shared={}))
        for number, name in enumerate(names):
            piece = Piece(file=f"rank{rank}.safetensors", offset=8 + 4 * number, start=0, count=1)
            entries.append(Entry(name=name, state=WEIGHT, dtype="F32", piece=piece))
    expected = [f"{layer}.{name}" for layer in (0, 1, 2, 3, 10) for name in ("weight", "bias")]
    assert list(index_of(ranks, entries).tensors) == expected


class Ends(torch.nn.Linear):
    """The first and the last layer, which share the weight and not the bias."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        torch.nn.init.eye_(self.weight)
        torch.nn.init.zeros_(self.bias)


def train(run_dir: str, schedule: str, ranks: int, steps: int, resume: str | None = None) -> list[float]:
    """The losses of the steps, with a checkpoint after the last."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from determined.pytorch import Batch

    from determined_ds import PipelineTrial, Trainer, open_context

    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 128).view(32, 4), torch.ones(32, 4))
    losses: list[float] = []

    class Tied(PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            ends = [TiedLayerSpec("ends", Ends, tied_weight_attr="weight") for _ in range(2)]
            return [ends[0], *(LayerSpec(torch.nn.LayerNorm, 4) for _ in range(6)), ends[1]]

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

        def on_step_end(self, batch_idx: int, metrics: dict[str, Any]) -> None:
            losses.append(float(metrics["loss"]))

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    optimizer = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
    hparams = {
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "pipe_parallel_size": ranks,
        "pipe_schedule": schedule,
        "deepspeed_config": {"optimizer": optimizer},
    }
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        Trainer(Tied(context), context).fit(max_length=Batch(steps), latest_checkpoint=resume)
    return losses


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
