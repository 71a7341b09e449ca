"""DeepSpeed's instruments in a user's JSON print what they should, and leave the training the same to the bit."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks
from tests.package import records

SAMPLES, MICRO_BATCHES, WIDTH = 8, 2, 64
SHAPES = {"zero3": 3, "pipeline": 1}
ASKED = {
    "comms_logger": {"enabled": True},
    "memory_breakdown": True,
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


def trial_of(shape: str) -> Any:
    from determined_ds import DataParallelTrial, PipelineTrial

    mse = torch.nn.functional.mse_loss

    def layers() -> list[torch.nn.Module]:
        return [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)]

    class Data:
        def build_training_data_loader(self: Any) -> Any:
            inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
            return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs[:, :2]))

        build_validation_data_loader = build_training_data_loader

    class Whole(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*layers())

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return mse(model(batch[0]), batch[1])

    class Staged(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return layers()

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return mse(outputs, targets)

    return Staged if shape == "pipeline" else Whole


def train(run_dir: str, shape: str, asked: dict[str, Any]) -> str:
    """In a rank: train some batches, with a validation between them; what was printed."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    hparams = {
        "global_batch_size": SAMPLES,
        "pipe_parallel_size": 2 if shape == "pipeline" else 1,
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES},
        "deepspeed_config": {
            "zero_optimization": {"stage": SHAPES[shape]},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            **asked,
        },
    }
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
    ):
        periods = {"reporting_period": Batch(3), "validation_period": Batch(2), "checkpoint_policy": "none"}
        Trainer(trial_of(shape)(context), context).fit(max_length=Batch(6), **periods)
    return out.getvalue()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_json_switches_on_is_printed_and_changes_nothing(
    two_ranks: Ranks, tmp_path: Path, shape: str
) -> None:
    """In deepspeed 0.19.8 a pipeline's timers, and so its ``flops_profiler``, fail in the first backward pass.

    Its communication logger ends the process at an exchange of objects.
    """
    two_ranks.run(train, str(tmp_path / "plain"), shape, {})
    printed, _ = two_ranks.run(train, str(tmp_path / "asked"), shape, ASKED)
    assert all(word in printed for word in ("time (ms)", "Max_MA", "Comm. Op"))
    plain, asked = (
        [report["loss"] for _, report in records(tmp_path / name, "training")] for name in ("plain", "asked")
    )
    assert len(plain) == 2
    assert asked == plain
