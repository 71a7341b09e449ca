"""A pipeline stops and continues under another schedule, whose ranks hold other layers and read other data.

The position in the data and the averages of ``EMA`` follow the layers, not the rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.callbacks import EMA
from tests.harness.ranks import Ranks

WIDTH = 5
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipe_schedule": "gpipe"},
    "zb-h1": {"pipe_schedule": "zb-h1"},
    "interleaved": {"pipe_schedule": "interleaved"},
    "interleaved, 4 chunks": {"pipe_schedule": "interleaved", "pipe_chunks": 4},
    "dualpipev": {"pipe_schedule": "dualpipev"},
}


def train(run_dir: Path, schedule: str, steps: int, resume: str | None = None) -> str:
    """Train in this rank. Returns the newest checkpoint."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from determined.pytorch import Batch

    from determined_ds import PipelineTrial, Trainer, open_context

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(40, WIDTH), torch.randn(40, WIDTH))
    few = torch.utils.data.TensorDataset(torch.randn(11, WIDTH), torch.randn(11, WIDTH))

    class Layer(torch.nn.Linear):
        def __init__(self, seed: int) -> None:
            super().__init__(WIDTH, WIDTH)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(super().forward(x))

    class Trial(PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            ends = (TiedLayerSpec("ends", Layer, 0, tied_weight_attr=["weight", "bias"]) for _ in range(2))
            return [next(ends), *(LayerSpec(Layer, seed) for seed in range(1, 7)), next(ends)]

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

        def build_callbacks(self) -> Any:
            return {"ema": EMA(0.8)}

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(few)

    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    ds_config = {"optimizer": optimizer, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}
    hparams = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "pipe_parallel_size": 2,
        "deepspeed_config": ds_config,
        **SCHEDULES[schedule],
    }
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        Trainer(Trial(context), context).fit(
            max_length=Batch(steps),
            reporting_period=Batch(1),
            validation_period=Batch(4),
            checkpoint_period=Batch(100),
            checkpoint_policy="none",
            latest_checkpoint=resume,
        )
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return newest.name


def reported(run_dir: Path) -> dict[tuple[str, int], float]:
    """The losses of both kinds at each report."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {"training": "loss", "validation": "validation_loss"}
    return {(r["group"], r["steps_completed"]): r["metrics"][names[r["group"]]] for r in records}


WAYS = [
    ["dualpipev", "1f1b", "interleaved"],
    ["zb-h1", "interleaved, 4 chunks", "dualpipev", "gpipe", "interleaved", "1f1b"],
]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(WAYS[0], id="three"),
        pytest.param(WAYS[1], id="all", marks=pytest.mark.long("three have every change of what ranks hold")),
    ],
)
def test_it_continues_as_if_nothing_had_changed(way: list[str], two_ranks: Ranks, tmp_path: Path) -> None:
    """Four batches under each."""
    two_ranks.run(train, tmp_path / "whole", "1f1b", 4 * len(way))
    uuid = None
    for number, schedule in enumerate(way):
        uuid, *_ = two_ranks.run(train, tmp_path / "run", schedule, 4 * (number + 1), uuid)
    whole, found = reported(tmp_path / "whole"), reported(tmp_path / "run")
    assert found.keys() == whole.keys()
    for key in whole:
        assert found[key] == pytest.approx(whole[key], rel=1e-5), key
