"""What ranks hand to each other in a step, to the byte, by the settings that docs/strategies.md speaks of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks
from tests.trial.regression import error_of, trial_class

SIZE = 64 * 256 + 256  # parameters, which two ranks divide evenly
FLOATS, HALVES = 4 * SIZE, 2 * SIZE
STEPS = 4  # ZeRO 3 compares what its ranks do in the first ones
ZERO = "zero_optimization"
GATHERED = ("all_gather_into_tensor", "float32")
BF16 = {"communication_data_type": "bf16"}
# Every parameter is divided, and let go after its use in the forward pass.
THREE: dict[str, Any] = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "overlap_comm": False,
}
# Setting -> of the JSON; (operation, dtype) -> bytes of the whole in a step; less than a kilobyte is left out.
SETTINGS: dict[str, tuple[dict[str, Any], dict[tuple[str, str], int]]] = {
    "fp32": ({}, {("all_reduce", "float32"): FLOATS}),
    "bf16": (BF16, {("all_reduce", "bfloat16"): HALVES}),
    "ZeRO 1": ({ZERO: {"stage": 1}}, {("all_reduce", "float32"): FLOATS, GATHERED: FLOATS}),
    "ZeRO 1, bf16": ({ZERO: {"stage": 1}, **BF16}, {("all_reduce", "bfloat16"): HALVES, GATHERED: FLOATS}),
    "ZeRO 2, in parts": (
        {ZERO: {"stage": 2, "use_multi_rank_bucket_allreduce": False}},
        {("reduce", "float32"): FLOATS, GATHERED: FLOATS},
    ),
    "ZeRO 2, gathered in parts": (
        {ZERO: {"stage": 2, "allgather_bucket_size": 100}},
        {("all_reduce", "float32"): FLOATS, GATHERED: FLOATS},
    ),
    "ZeRO 3": ({ZERO: THREE}, {GATHERED: 2 * FLOATS, ("reduce_scatter_tensor", "float32"): FLOATS}),
    "ZeRO 3, bf16": (
        {ZERO: THREE, **BF16},
        {GATHERED: 2 * FLOATS, ("reduce_scatter_tensor", "bfloat16"): HALVES},
    ),
    "ddp": ({}, {}),  # by torch's reducer, which asks nobody
    # Once a step, however many micro-batches it has.
    "ddp, bf16": (
        {**BF16, "gradient_accumulation_steps": 2},
        {("all_reduce", "bfloat16"): HALVES},
    ),
}


def sent(run_dir: Path) -> dict[str, dict[tuple[str, str], int]]:
    """In a rank: the large operations of each setting's last step."""
    from determined_ds import open_context
    from tests.harness.communication import recorded_calls

    def build_model(self: Any) -> torch.nn.Module:
        first, second = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 1, bias=False)
        return torch.nn.Sequential(first, torch.nn.Tanh(), second)

    small = trial_class(build_model=build_model, loss=lambda self, model, batch: error_of(model(batch)))
    found = {}
    for name, (changes, _) in SETTINGS.items():
        hparams = {
            "global_batch_size": 8,
            "deepspeed_config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **changes},
        }
        engine = "ddp" if name.startswith("ddp") else "deepspeed"
        with (
            open_context(
                hparams=hparams, run_dir=run_dir / name, accelerator="cpu", engine=engine
            ) as context,
            recorded_calls() as calls,
        ):
            trial = small(context)
            for step in range(STEPS):
                calls.clear()
                for _ in range(trial.engine.gradient_accumulation_steps()):
                    trial.train_batch(iter([torch.ones(trial.micro_batch_size, 64)]), 0, step)
            large: Counter[tuple[str, str]] = Counter()
            for call in calls:
                large[call.operation, call.dtype] += call.num_bytes if call.num_bytes > 1000 else 0
            found[name] = {key: size for key, size in large.items() if size}
    return found


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = two_ranks.run(sent, tmp_path_factory.mktemp("runs"))[0]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_of_a_step(measured: dict[str, Any], name: str) -> None:
    assert measured[name] == SETTINGS[name][1]
