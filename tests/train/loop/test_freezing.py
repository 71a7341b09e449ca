"""A group whose rate is 0 stays bit for bit as it is; freezing by hand is refused where the engine would not follow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed

STEPS = 6


def train(run_dir: Path, zero_stage: int, case: str = "") -> Any:
    """Train in this rank; the first layer's rate is 0 in steps 2 and 3. Returns its weights after each step."""
    import deepspeed
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randn(64, 3))
    seen: list[Any] = []

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
            return model.requires_grad_(case != "unfrozen by hand")

        def build_parameters(self, model: Any) -> Any:
            model[2].requires_grad_(True)
            return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]

        def build_scheduler(self, optimizer: Any) -> Any:
            rates = [lambda step: float(step not in (2, 3)), lambda step: 1.0]
            return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            if "by hand" in case:
                self.engine.module[0].requires_grad_(case == "unfrozen by hand")
            with deepspeed.zero.GatheredParameters(
                list(self.engine.module.parameters()), enabled=zero_stage == 3
            ):
                seen.append(
                    [part.detach().float().numpy().copy() for part in self.engine.module.parameters()]
                )

        def loss(self, model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    ds_config = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = Mine(context)
        Trainer(trial, context).fit(max_length=Batch(STEPS), checkpoint_policy="none")
    return seen


def moved(seen: list[Any]) -> list[tuple[bool, bool]]:
    """After each step but the first, whether the first and the last layer have moved."""
    pairs = itertools.pairwise(seen)
    return [((now[0] != before[0]).any(), (now[2] != before[2]).any()) for before, now in pairs]


def test_a_group_with_a_rate_of_0_stays(two_ranks: Ranks, tmp_path: Path) -> None:
    """As docs/your-model.md freezes layers for some steps; the other group trains on."""
    seen = two_ranks.run(train, tmp_path, 3)[0]
    assert moved(seen) == [(True, True), (False, True), (False, True), (True, True), (True, True)]


@pytest.mark.parametrize(
    ("case", "zero_stage", "said"),
    [
        pytest.param(
            *("frozen by hand", 2, "0.weight was frozen in training"),
            marks=pytest.mark.long("unfreezing is refused by the same lines"),
        ),
        ("unfrozen by hand", 3, "0.weight was unfrozen in training"),
    ],
)
def test_what_the_engine_would_not_follow_is_refused(
    case: str, zero_stage: int, said: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed, match=said):
        two_ranks.run(train, tmp_path, zero_stage, case)
