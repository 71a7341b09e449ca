"""``EMA``: the average of the weights after each step, in parts, under every ZeRO stage; validated, saved, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.callbacks import EMA
from determined_ds.errors import ConfigError
from determined_ds.trial.own_parts import merge_parts
from tests.ranks import Ranks

STEPS = 6
DECAY = 0.8


@pytest.mark.parametrize("decay", [0, 1, 1.5, True, "0.9"])
def test_a_decay_is_between_0_and_1(decay: Any) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        EMA(decay)


def test_under_determineds_own_loop_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect under Determined's own Trainer"):
        EMA().on_training_start()


def test_parts_of_any_number_of_replicas_make_the_whole() -> None:
    whole = torch.arange(5.0)
    for replicas in (1, 2, 3, 8):
        size = -(-5 // replicas)
        states = [
            {
                "replica": replica,
                "shapes": {"w": [5, 1]},
                "parts": {"w": whole[replica * size : (replica + 1) * size]},
            }
            for replica in reversed(range(replicas))
        ]
        assert merge_parts(states)["w"].tolist() == whole[:, None].tolist()


# ------------------------------------------------------------------------------------------- in ranks


def train(run_dir: Path, kind: str, half: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train in this rank. Returns the weights after each step, those that were validated, and the newest checkpoint."""
    import deepspeed
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, Trainer, open_context

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(32, 5), torch.randn(32, 3))
    after: list[Any] = []
    validated: list[Any] = []

    def weights(module: Any) -> dict[str, Any]:
        parameters = dict(module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=kind in ("3", "offload")):
            return {name: value.detach().float().numpy().copy() for name, value in parameters.items()}

    class Averaged:
        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            after.append(weights(self.engine.module))

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            if len(validated) < len(after):
                validated.append(weights(self.engine.module))
            return super().evaluate_batch(dataloader_iter, batch_idx)

        def build_callbacks(self) -> Any:
            return {"ema": EMA(DECAY)}

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    class Whole(Averaged, DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))

        def loss(self, model: Any, batch: Any) -> Any:
            inputs = batch[0].to(next(model.parameters()).dtype)
            return torch.nn.functional.mse_loss(model(inputs).float(), batch[1])

    class Staged(Averaged, PipelineTrial):
        def build_layers(self) -> Any:
            return [torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)]

        def loss(self, outputs: Any, targets: Any) -> Any:
            return torch.nn.functional.mse_loss(outputs, targets)

    params = {"lr": 0.1, "torch_adam": True}
    ds_config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}}
    ds_config["zero_optimization"] = {"stage": int(kind) if kind.isdigit() else 0}
    if kind == "3" and half == "bf16":
        ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 10  # one of each
    if kind == "offload":
        device = {"device": "cpu"}
        ds_config["zero_optimization"] = {"stage": 3, "offload_param": device, "offload_optimizer": device}
        ds_config["optimizer"]["params"] = {"lr": 0.1}
    if half == "bf16":
        ds_config["bf16"] = {"enabled": True}
    hparams = {
        "global_batch_size": 8,
        "pipe_parallel_size": 2 if kind == "pipeline" else 1,
        "deepspeed_config": ds_config,
    }
    with open_context(
        hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp" if kind == "ddp" else "deepspeed"
    ) as context:
        trial: Any = (Staged if kind == "pipeline" else Whole)(context)  # type: ignore[arg-type, abstract]
        first = weights(trial.engine.module)
        Trainer(trial, context).fit(
            max_length=Batch(steps),
            validation_period=Batch(1),
            checkpoint_policy="none",
            latest_checkpoint=resume,
        )
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return {"first": first, "after": after, "validated": validated, "uuid": newest.name}


CASES = [
    (kind, half)
    for kind in ("0", "1", "2", "3", "offload", "pipeline", "ddp")
    for half in ("fp32", "bf16")
    if half == "fp32" or kind.isdigit()
]
SHORT = (("1", "fp32"), ("3", "bf16"))


@pytest.mark.parametrize(
    ("kind", "half"),
    [
        case
        if case in SHORT
        else pytest.param(*case, marks=pytest.mark.long("ZeRO 1 and 3 stand for a whole and a split model"))
        for case in CASES
    ],
)
def test_validated_is_the_average_and_trained_on_are_the_weights(
    kind: str, half: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    whole = two_ranks.run(train, tmp_path / "whole", kind, half, STEPS)
    stopped = two_ranks.run(train, tmp_path / "stopped", kind, half, 2)
    resumed = two_ranks.run(train, tmp_path / "stopped", kind, half, STEPS, stopped[0]["uuid"])
    exact = {"rtol": 1e-6, "atol": 1e-7} if half == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    for before, now, then in zip(whole, stopped, resumed, strict=True):
        average = before["first"]
        for after, validated in zip(before["after"], before["validated"], strict=True):
            average = {name: DECAY * average[name] + (1 - DECAY) * after[name] for name in average}
            for name, value in average.items():
                np.testing.assert_allclose(validated[name], value, **exact)
                assert not np.array_equal(validated[name], after[name])
        for key in ("after", "validated"):
            parts = [*now[key], *then[key]]
            assert len(parts) == STEPS
            for one, other in zip(before[key], parts, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in one), key


@pytest.mark.parametrize(
    ("then", "now", "ranks"),
    [
        ("1", "3", 1),
        pytest.param("3", "0", 1, marks=pytest.mark.long("from ZeRO 1 to 3 stands for it")),
        pytest.param("3", "1", 4, marks=pytest.mark.long("one rank stands for it")),
        pytest.param("pipeline", "pipeline", 4, marks=pytest.mark.long("test_redistributed has its places")),
    ],
)
def test_the_average_continues_on_other_ranks(
    then: str, now: str, ranks: int, one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """Two batches by two ranks, the others by one or four under another stage."""
    whole, *_ = two_ranks.run(train, tmp_path / "whole", then, "fp32", STEPS)
    stopped, *_ = two_ranks.run(train, tmp_path / "run", then, "fp32", 2)
    others = one_rank if ranks == 1 else four_ranks
    resumed, *_ = others.run(train, tmp_path / "run", now, "fp32", STEPS, stopped["uuid"])
    for key in ("after", "validated"):
        parts = [*stopped[key], *resumed[key]]
        assert len(parts) == STEPS
        for found, expected in zip(parts, whole[key], strict=True):
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
