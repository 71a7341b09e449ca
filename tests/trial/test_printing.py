"""What a DeepSpeed JSON asks to be printed, and where it asks for files: the user gets it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks

BATCHES = 4
ASKED = {
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "dump_state": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "flops.txt"},
    "tensorboard": {"enabled": True, "job_name": "deepspeed"},
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "deepspeed"},
}


def printed(run_dir: str, ds_config: dict[str, Any], staged: bool = False) -> str:
    """In a rank: train some batches, and return what was printed and logged."""
    import torch
    from deepspeed.utils import logger
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, Trainer, open_context

    class Data:
        def prepare(self) -> None:
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
            self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self.data)  # type: ignore[attr-defined]

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self.data)  # type: ignore[attr-defined]

    class Whole(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 2)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    class Staged(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

    hparams = {"global_batch_size": 4, "deepspeed_config": ds_config}
    out = io.StringIO()
    logger.handlers[0].setStream(out)  # type: ignore[attr-defined]
    with (
        contextlib.redirect_stdout(out),
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
    ):
        Trainer(Staged(context) if staged else Whole(context), context).fit(max_length=Batch(BATCHES))
    return out.getvalue()


def with_adam(**asked: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **asked,
    }


def test_what_is_asked_for_is_printed_and_written(one_rank: Ranks, tmp_path: Path) -> None:
    [text] = one_rank.run(printed, str(tmp_path), with_adam(**ASKED))
    lines = text.splitlines()
    assert sum("step=" in line and "skipped=0, lr=[0.01]" in line for line in lines) == BATCHES // 2
    assert "RunningAvgSamplesPerSec" in text
    assert sum("| fwd_microstep: " in line for line in lines) == BATCHES
    assert sum("DeepSpeedEngine:" in line for line in lines) == 1
    assert "comm op: all_reduce" in text  # each, as it is done
    assert "Comm. Op" in text  # and the table, at the end
    folder = tmp_path / "tensorboard"
    assert "Flops Profiler" in (folder / "flops.txt").read_text()
    assert "0.01" in (folder / "csv" / "deepspeed" / "Train_Samples_lr.csv").read_text()
    assert list((folder / "deepspeed").glob("*tfevents*"))


def test_what_is_not_asked_for_is_not_printed(one_rank: Ranks, tmp_path: Path) -> None:
    """DeepSpeed says nothing of itself; and a section that is not enabled asks for nothing."""
    [text] = one_rank.run(printed, str(tmp_path), with_adam(comms_logger={"enabled": False, "verbose": True}))
    said = [
        line
        for line in text.splitlines()
        if not line.startswith(("training ", "checkpoint ", "trained ", "best ", "newest "))
    ]
    assert [line for line in said if "validation" not in line] == []


def test_warnings_of_deepspeed_reach_the_user(one_rank: Ranks, tmp_path: Path) -> None:
    """A pipeline's engine drops this one, and says so."""
    zero = {"stage": 1, "overlap_comm": True}
    ds_config = {**with_adam(), "zero_optimization": zero}
    [text] = one_rank.run(printed, str(tmp_path), ds_config, staged=True)
    assert "Pipeline parallelism does not support overlapped communication" in text


@pytest.mark.parametrize("level", ["error", "info"])
def test_the_log_level_is_the_jsons(one_rank: Ranks, tmp_path: Path, level: str) -> None:
    [text] = one_rank.run(printed, str(tmp_path), with_adam(log_level=level))
    assert ("[INFO]" in text) == (level == "info")


def test_a_pipeline_times_its_steps_without_steps_per_print(one_rank: Ranks, tmp_path: Path) -> None:
    """DeepSpeed divides by it there."""
    [text] = one_rank.run(printed, str(tmp_path), with_adam(wall_clock_breakdown=True), staged=True)
    assert sum("| fwd_microstep: " in line for line in text.splitlines()) == BATCHES


def test_the_section_activation_checkpointing_reaches_deepspeeds_function(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Which a pipeline calls; no engine hands it over. ``profile`` prints each time that a layer is computed again."""
    asked = {
        "activation_checkpointing": {"partition_activations": True, "profile": True},
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    [text] = one_rank.run(printed, str(tmp_path), with_adam(**asked), staged=True)
    assert text.count("| backward: ") >= BATCHES
