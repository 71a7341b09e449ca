"""``frozen``: groups of parameters that some steps leave bit for bit as they are; and what is refused by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from determined_ds.errors import ConfigError
from tests.ranks import Ranks, RanksFailed

STEPS = 6


def train(
    run_dir: Path, zero_stage: int, case: str = "", steps: int = STEPS, resume: str | None = None
) -> Any:
    """Train in this rank; the first layer is frozen in steps 2 and 3. Returns its weights after each step."""
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
            if case == "one group":
                return list(model.parameters())
            model[2].requires_grad_(True)
            return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]

        def frozen(self, batch_idx: int) -> Any:
            return (
                [self.engine.module[0]]
                if batch_idx in (2, 3) and case in ("", "one group", "offload")
                else []
            )

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            if case == "for a moment":  # as trials of two networks do, between their steps
                self.engine.module.requires_grad_(False)
            elif "by hand" in case:
                self.engine.module[0].requires_grad_(case == "unfrozen by hand")
            with deepspeed.zero.GatheredParameters(
                list(self.engine.module.parameters()), enabled=zero_stage == 3
            ):
                seen.append(
                    [part.detach().float().numpy().copy() for part in self.engine.module.parameters()]
                )

        def loss(self, model: Any, batch: Any) -> Any:
            if case == "for a moment":
                self.engine.module.requires_grad_(True)
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
    if case == "offload":
        ds_config["zero_optimization"] = {"stage": zero_stage, "offload_optimizer": {"device": "cpu"}}
        ds_config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = Mine(context)
        Trainer(trial, context).fit(
            max_length=Batch(steps), latest_checkpoint=resume, checkpoint_policy="none"
        )
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return seen, newest.name


def moved(seen: list[Any]) -> list[tuple[bool, bool]]:
    """After each step but the first, whether the first and the last layer have moved."""
    pairs = itertools.pairwise(seen)
    return [((now[0] != before[0]).any(), (now[2] != before[2]).any()) for before, now in pairs]


@pytest.fixture(scope="module")
def without_zero(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return two_ranks.run(train, tmp_path_factory.mktemp("zero0"), 0)[0][0]


@pytest.mark.parametrize(
    "zero_stage", [1, 3, pytest.param(2, marks=pytest.mark.long("ZeRO 1 and 3 are short"))]
)
def test_frozen_weights_stay_under_every_stage_alike(
    zero_stage: int, two_ranks: Ranks, without_zero: Any, tmp_path: Path
) -> None:
    """Also in a run that is resumed while they are frozen."""
    seen, _ = two_ranks.run(train, tmp_path / "whole", zero_stage)[0]
    assert moved(seen) == [(True, True), (False, True), (False, True), (True, True), (True, True)]
    for one, other in zip(seen, without_zero, strict=True):
        for now, then in zip(one, other, strict=True):
            torch.testing.assert_close(torch.tensor(now), torch.tensor(then), rtol=1e-5, atol=1e-6)
    first, uuid = two_ranks.run(train, tmp_path / "stopped", zero_stage, "", 3)[0]
    then, _ = two_ranks.run(train, tmp_path / "stopped", zero_stage, "", STEPS, uuid)[0]
    for one, other in zip(seen, [*first, *then], strict=True):
        assert all((now == then).all() for now, then in zip(one, other, strict=True))


@pytest.mark.long("compiles DeepSpeed's Adam where that was never done")
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_an_offloaded_optimizer_leaves_them_out_too(
    zero_stage: int, two_ranks: Ranks, without_zero: Any, tmp_path: Path
) -> None:
    seen, _ = two_ranks.run(train, tmp_path, zero_stage, "offload")[0]
    for one, other in zip(seen, without_zero, strict=True):
        for now, then in zip(one, other, strict=True):
            torch.testing.assert_close(torch.tensor(now), torch.tensor(then), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "zero_stage", "said"),
    [
        ("one group", 1, "freezes a part of group 0"),
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


@pytest.mark.long("a trial of two networks would fail at its first step")
def test_what_is_off_between_steps_alone_is_trained(one_rank: Ranks, tmp_path: Path) -> None:
    assert len(one_rank.run(train, tmp_path, 1, "for a moment")[0][0]) == STEPS


@pytest.mark.parametrize("case", ["frozen by hand", "unfrozen by hand"])
def test_without_zero_torch_follows(case: str, one_rank: Ranks, tmp_path: Path) -> None:
    seen, _ = one_rank.run(train, tmp_path, 0, case)[0]
    assert {first for first, _ in moved(seen)} == {case == "unfrozen by hand"}


@pytest.mark.parametrize(
    "own",
    [{"frozen": list}, {"on_step_end": print}, {"validation_metrics": {"validation_loss": "mean"}}, {}],
)
def test_what_determineds_own_loop_would_leave_out_is_refused(own: dict[str, Any]) -> None:
    from determined_ds import DataParallelTrial

    kind: Any = type("Mine", (DataParallelTrial,), own)
    kind.__abstractmethods__ = frozenset()
    trial = object.__new__(kind)
    trial.context = SimpleNamespace()
    if not own:
        trial._check_loop()
        return
    with pytest.raises(ConfigError, match=rf"Mine\.{next(iter(own))}: has no effect under Determined's own"):
        trial._check_loop()
