"""torch's DistributedDataParallel in DeepSpeed's place: what it takes of the JSON, and what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.trial.regression import Regression, trial_class


def hyperparameters(**json: Any) -> dict[str, Any]:
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}
    return {"global_batch_size": 8, "learning_rate": 0.02, "deepspeed_config": {"scheduler": section, **json}}


def build(run_dir: Path, hparams: dict[str, Any], kind: str = "") -> Any:
    """In a rank: what an engine of these hyperparameters is like, or why there is none."""
    from determined_ds import ConfigError, open_context
    from tests.dropin.trials import Replicated

    try:
        with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp") as context:
            engine = (Replicated if kind == "by hand" else trial_class(kind))(context).engine
            weights = {str(parameter.dtype) for parameter in engine.parameters()}
            parts = [type(part).__name__ for part in (engine.optimizer, engine.lr_scheduler)]
            return *parts, weights, str(engine(Regression().inputs[:2]).dtype)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("stated", "name"), [("adam", "AdamW"), ("RMSprop", "RMSprop")])
def test_what_deepspeed_would_take(one_rank: Ranks, tmp_path: Path, stated: str, name: str) -> None:
    """bf16 is an autocast over fp32 weights."""
    hparams = hyperparameters(optimizer={"type": stated}, bf16={"enabled": True})
    [found] = one_rank.run(build, tmp_path, hparams)
    assert found == (name, "WarmupLR", {"torch.float32"}, "torch.bfloat16")


@pytest.mark.parametrize(
    ("json", "kind", "said"),
    [
        ({"optimizer": {"type": "Lamb"}}, "", "optimizer.type = 'Lamb'"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "", "torch_autocast.enabled"),
        ({"communication_data_type": "bf16"}, "", "communication_data_type = 'bf16'"),
        # It would be measured under the name of ddp.
        ({}, "by hand", "wraps an engine of deepspeed, which would train instead"),
    ],
)
def test_what_torch_alone_cannot_do(
    one_rank: Ranks, tmp_path: Path, json: dict[str, Any], kind: str, said: str
) -> None:
    (found,) = one_rank.run(build, tmp_path, hyperparameters(**json), kind)
    assert said in found
