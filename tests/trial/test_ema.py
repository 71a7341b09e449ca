"""``EMA``: the average of the weights after each step, in parts, under every ZeRO stage; validated, saved, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from determined_ds.callbacks import EMA
from determined_ds.errors import ConfigError, DeterminedDSError
from tests.harness.ranks import Ranks
from tests.package import checkpoints
from tests.trial.regression import train, trial_class

STEPS = 6
DECAY = 0.8


@pytest.mark.parametrize("decay", [0, 1, "0.9"])
def test_a_decay_is_between_0_and_1(decay: Any) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        EMA(decay)


# ------------------------------------------------------------------------------------------- in ranks


def refused(run_dir: Path, own_layout: bool) -> str:
    """In this rank: the words that refuse an EMA where no checkpoint of ours would hold it."""
    import torch
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = MoE(4, torch.nn.Linear(4, 4), num_experts=1)

        def forward(self, inputs: Any) -> Any:
            return self.experts(inputs)[0].sum(1, keepdim=True)

    class Averaged:
        def build_callbacks(self) -> Any:
            return {"ema": EMA(DECAY)}

        if own_layout:

            def build_model(self) -> Any:
                return Experts()

        else:

            def save(self, context: Any, path: Path) -> None:
                """Write the engine in another way than the library's."""

    ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
    with pytest.raises(DeterminedDSError) as found:
        train(run_dir, trial_class("", Averaged), {"deepspeed_config": ds_config}, steps=1)
    return str(found.value)


@pytest.mark.parametrize(
    ("own_layout", "says"), [(True, "DeepSpeed writes itself: it has experts"), (False, "save")]
)
def test_an_average_that_no_checkpoint_would_hold_is_refused(
    own_layout: bool, says: str, one_rank: Ranks, tmp_path: Path
) -> None:
    (words,) = one_rank.run(refused, tmp_path / "run", own_layout)
    assert "EMA" in words
    assert says in words


def run(run_dir: Path, kind: str, half: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train in this rank. Returns the weights after each step, those that were validated, and the newest checkpoint."""
    import deepspeed
    from determined.pytorch import Batch

    first: list[Any] = []
    after: list[Any] = []
    validated: list[Any] = []

    def weights(module: Any) -> dict[str, Any]:
        parameters = dict(module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=kind in ("3", "offload")):
            return {name: value.detach().float().numpy().copy() for name, value in parameters.items()}

    class Averaged:
        engine: Any

        def __init__(self, context: Any) -> None:
            super().__init__(context)  # type: ignore[call-arg]
            first.append(weights(self.engine.module))

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            after.append(weights(self.engine.module))

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            if len(validated) < len(after):
                validated.append(weights(self.engine.module))
            return super().evaluate_batch(dataloader_iter, batch_idx)  # type: ignore[misc]

        def build_callbacks(self) -> Any:
            return {"ema": EMA(DECAY)}

    zero: dict[str, Any] = {"stage": int(kind) if kind.isdigit() else 0}
    if kind == "3" and half == "bf16":
        zero["stage3_param_persistence_threshold"] = 10  # one of each
    if kind == "offload":
        zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    params = {"lr": 0.1} if kind == "offload" else {"lr": 0.1, "torch_adam": True}
    ds_config = {
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "bf16": {"enabled": half == "bf16"},
    }
    train(
        run_dir,
        trial_class(kind, Averaged),
        {"pipe_parallel_size": 2 if kind == "pipeline" else 1, "deepspeed_config": ds_config},
        steps=steps,
        engine="ddp" if kind == "ddp" else "deepspeed",
        validation_period=Batch(1),
        checkpoint_policy="none",
        latest_checkpoint=resume,
    )
    (newest, *_) = checkpoints(run_dir)
    return {"first": first[0], "after": after, "validated": validated, "uuid": newest.name}


MORE = [(kind, "fp32") for kind in ("0", "2", "3", "offload", "pipeline", "ddp")]
STAND = pytest.mark.long("ZeRO 1 and 3 stand for a whole and a split model")


@pytest.mark.parametrize(
    ("kind", "half"), [("1", "fp32"), ("3", "bf16"), *(pytest.param(*case, marks=STAND) for case in MORE)]
)
def test_validated_is_the_average_and_trained_on_are_the_weights(
    kind: str, half: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    whole = two_ranks.run(run, tmp_path / "whole", kind, half, STEPS)
    stopped = two_ranks.run(run, tmp_path / "stopped", kind, half, 2)
    resumed = two_ranks.run(run, tmp_path / "stopped", kind, half, STEPS, stopped[0]["uuid"])
    exact = {"rtol": 1e-6, "atol": 1e-7} if half == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    for before, now, then in zip(whole, stopped, resumed, strict=True):
        average = before["first"]
        for after, validated in zip(before["after"], before["validated"], strict=True):
            average = {name: DECAY * average[name] + (1 - DECAY) * after[name] for name in average}
            for name, value in average.items():
                np.testing.assert_allclose(validated[name], value, **exact)
            assert not all(np.array_equal(validated[name], after[name]) for name in average)
        for key in ("after", "validated"):
            parts = [*now[key], *then[key]]
            assert len(parts) == STEPS
            for one, other in zip(before[key], parts, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in one), key


@pytest.mark.parametrize(
    ("then", "now", "ranks"),
    [("1", "3", 1), pytest.param("3", "1", 4, marks=pytest.mark.long("one rank stands for it"))],
)
def test_the_average_continues_on_other_ranks(
    then: str, now: str, ranks: int, one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """Two batches by two ranks, the others by one or four under another stage."""
    whole, *_ = two_ranks.run(run, tmp_path / "whole", then, "fp32", STEPS)
    stopped, *_ = two_ranks.run(run, tmp_path / "run", then, "fp32", 2)
    others = one_rank if ranks == 1 else four_ranks
    resumed, *_ = others.run(run, tmp_path / "run", now, "fp32", STEPS, stopped["uuid"])
    for key in ("after", "validated"):
        parts = [*stopped[key], *resumed[key]]
        assert len(parts) == STEPS
        for found, expected in zip(parts, whole[key], strict=True):
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
