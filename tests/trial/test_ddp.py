"""torch's DistributedDataParallel in DeepSpeed's place: what it takes of the JSON, and what it cannot do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.trial.regression import Regression, trial_class


def hyperparameters(**json: Any) -> dict[str, Any]:
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}
    return {"global_batch_size": 8, "learning_rate": 0.02, "deepspeed_config": {"scheduler": section, **json}}


def build(run_dir: Path, hparams: dict[str, Any], kind: str = "") -> dict[str, Any] | str:
    """In a rank: what an engine of these hyperparameters is like, or why there is none."""
    from determined_ds import ConfigError, open_context
    from tests.dropin.trials import Replicated

    try:
        with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp") as context:
            engine = (Replicated if kind == "by hand" else trial_class(kind))(context).engine
            return {
                "optimizer": type(engine.optimizer).__name__,
                "schedule": type(engine.lr_scheduler).__name__,
                "weights": {str(parameter.dtype) for parameter in engine.parameters()},
                "outputs": str(engine(Regression().inputs[:2]).dtype),
                "first": next(name for name, _ in engine.named_parameters()),
            }
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ({"type": "adam"}, "AdamW"),  # as DeepSpeed takes it
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, "RMSprop"),
    ],
)
def test_what_deepspeed_would_take(
    one_rank: Ranks, tmp_path: Path, stated: dict[str, Any], name: str
) -> None:
    """bf16 is an autocast over fp32 weights; names are those in DeepSpeed's engine."""
    (found,) = one_rank.run(build, tmp_path, hyperparameters(optimizer=stated, bf16={"enabled": True}))
    assert (found["optimizer"], found["schedule"], found["first"]) == (name, "WarmupLR", "module.0.weight")
    assert (found["weights"], found["outputs"]) == ({"torch.float32"}, "torch.bfloat16")


@pytest.mark.parametrize(
    ("json", "kind", "said"),
    [
        ({"optimizer": {"type": "Lamb"}}, "", "optimizer.type = 'Lamb': .* one of torch's optimizers"),
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
    assert re.search(said + ".*fix: ", str(found), re.DOTALL)
