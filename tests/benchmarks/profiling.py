"""What recording costs: steps that torch's profiler records, beside the steps before and after them in one training.

python -m tests.benchmarks.profiling
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import Batch

from determined_ds import DataParallelTrial, Trainer, open_context
from determined_ds.config.profiled_steps import ProfiledSteps

PROFILE = ProfiledSteps(wait=12, warmup=3, active=10)
LENGTH, TURNS = 40, 5
# Width, layers and rows of a micro-batch -> steps of about 5, 50 and 200 ms on one core.
SIZES = {"5 ms": (128, 8, 128), "50 ms": (512, 8, 256), "200 ms": (1024, 8, 256)}


def step_seconds(folder: Path, size: str, profile: ProfiledSteps | None) -> list[float]:
    """Train, and return how long each step took."""
    width, layers, rows = SIZES[size]
    data = torch.utils.data.TensorDataset(torch.randn(2048, width), torch.randn(2048, width))
    ends: list[float] = []

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            ends.append(time.perf_counter())

        def loss(self, model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    ds_config = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    hparams = {"global_batch_size": rows, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        Trainer(Mine(context), context).fit(
            max_length=Batch(LENGTH), checkpoint_policy="none", profile=profile
        )
    return [after - before for before, after in itertools.pairwise(ends)]


def ratio(folder: Path, size: str) -> tuple[float, float]:
    """A recorded step by one that is not, and a step of a training with a profile, not recorded, by one without."""
    with_profile = step_seconds(folder / "profiled", size, PROFILE)
    plain = step_seconds(folder / "plain", size, None)
    first, end = PROFILE.wait + PROFILE.warmup, PROFILE.total
    recorded = with_profile[first : end - 1]  # the trace is written after the last one
    waiting = with_profile[2 : PROFILE.wait - 1]
    others = [*waiting, *with_profile[end:]]
    median = statistics.median
    return median(recorded) / median(others), median(waiting) / median(plain[2 : PROFILE.wait - 1])


def table() -> str:
    """Measure, and return the table."""
    rows = ["| step | recorded / not | waiting / without fit.profile |", "|---|---|---|"]
    for size in SIZES:
        found = []
        for _ in range(TURNS):
            with tempfile.TemporaryDirectory() as folder:
                found.append(ratio(Path(folder), size))
        cells = [_cell(each) for each in zip(*found, strict=True)]
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(found: tuple[float, ...]) -> str:
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
