"""torch's DistributedDataParallel trains what ZeRO 0 trains: the same losses, rates and norms, without DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import Regression, train, trial_class

STEPS = 6
CLIPPING = 0.05
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}


def hyperparameters(accumulation: int = 1, **json: Any) -> dict[str, Any]:
    return {
        "learning_rate": 0.02,
        "warmup_num_steps": 4,
        "deepspeed_config": {
            "gradient_clipping": CLIPPING,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
            **json,
        },
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": accumulation},
    }


def run(run_dir: Path, engine: str, hparams: dict[str, Any]) -> None:
    """In a rank: train and validate under our loop."""
    from determined.pytorch import Batch

    half = Batch(STEPS // 2)
    fit = {"validation_period": half, "checkpoint_policy": "none"}
    train(run_dir, trial_class(), hparams, steps=STEPS, engine=engine, **fit)


def reported(run_dir: Path, group: str) -> list[dict[str, Any]]:
    return [metrics for _, metrics in records(run_dir, group)]


@pytest.mark.parametrize(
    ("num_ranks", "accumulation", "optimizer"),
    [(2, 2, ADAMW), (2, 1, SGD), (1, 2, ADAMW)],
    ids=["accumulated", "SGD", "one rank"],
)
def test_the_same_training_as_zero_0(
    num_ranks: int,
    accumulation: int,
    optimizer: dict[str, Any],
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
) -> None:
    hparams = hyperparameters(accumulation, optimizer=optimizer)
    for engine in ("deepspeed", "ddp"):
        (one_rank if num_ranks == 1 else two_ranks).run(run, tmp_path / engine, engine, hparams)
    for group, names in (("training", ("loss", "lr", "grad_norm")), ("validation", ("validation_loss",))):
        found, wanted = (reported(tmp_path / engine, group) for engine in ("ddp", "deepspeed"))
        for name in names:
            values = [metrics[name] for metrics in found]
            assert values == pytest.approx([metrics[name] for metrics in wanted], rel=1e-6), name
    reports = reported(tmp_path / "ddp", "training")
    assert len(reports) == STEPS
    assert all(report["grad_norm"] > CLIPPING for report in reports), "clipping is to bite"
    assert reports[0]["lr"] < reports[-1]["lr"] == pytest.approx(0.02), "and the rate to rise"
    first, last = reported(tmp_path / "ddp", "validation")
    assert last["validation_loss"] < first["validation_loss"], "it learns"


def build(run_dir: Path, hparams: dict[str, Any], kind: str = "") -> dict[str, Any] | str:
    """In a rank: what an engine of these hyperparameters is like, or why there is none."""
    from determined_ds import open_context
    from determined_ds.errors import ConfigError

    hparams = {"global_batch_size": 8, **hparams}
    try:
        with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp") as context:
            engine = trial_class(kind)(context).engine
            assert context.models == [engine]
            return {
                "optimizer": type(engine.optimizer).__name__,
                "schedule": type(engine.lr_scheduler).__name__,
                "weights": {str(parameter.dtype) for parameter in engine.parameters()},
                "outputs": str(engine(Regression().inputs[:2]).dtype),
                "half": (engine.bfloat16_enabled(), engine.fp16_enabled()),
                "names": [name for name, _ in engine.named_parameters()],
            }
    except ConfigError as error:
        return str(error)


def test_what_deepspeed_would_take(one_rank: Ranks, tmp_path: Path) -> None:
    for stated, name in (
        ({"type": "adam"}, "AdamW"),  # as DeepSpeed takes it
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, "RMSprop"),
    ):
        json = hyperparameters(optimizer=stated, bf16={"enabled": name == "RMSprop"})
        (found,) = one_rank.run(build, tmp_path / name, json)
        assert (found["optimizer"], found["schedule"]) == (name, "WarmupLR")
        assert found["names"][0] == "module.0.weight", "as in DeepSpeed's engine"
    # bf16 is an autocast over fp32 weights
    assert (found["weights"], found["outputs"]) == ({"torch.float32"}, "torch.bfloat16")
    assert found["half"] == (True, False)


@pytest.mark.parametrize(
    ("json", "said"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type = 'Lamb': .* one of torch's optimizers"),
        ({"optimizer": {}}, "optimizer.type = null: .* one of torch's optimizers"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.enabled"),
        ({"communication_data_type": "bf16"}, "communication_data_type = 'bf16'"),
    ],
)
def test_what_torch_alone_cannot_do(one_rank: Ranks, tmp_path: Path, json: dict[str, Any], said: str) -> None:
    (found,) = one_rank.run(build, tmp_path, hyperparameters(**json))
    assert re.search(said + ".*fix: ", str(found), re.DOTALL)


def wrap_an_engine_of_ones_own(run_dir: Path) -> None:
    from determined_ds import ConfigError, open_context
    from tests.dropin.trials import Replicated

    with (
        open_context(run_dir=run_dir, accelerator="cpu", engine="ddp") as context,
        pytest.raises(ConfigError, match="wraps an engine of deepspeed, which would train instead"),
    ):
        Replicated(context)


def test_what_deepspeed_alone_can_train_is_refused(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """A trial that makes its engine itself would be measured under the name of ddp."""
    one_rank.run(wrap_an_engine_of_ones_own, tmp_path / "own")
    cut = {**hyperparameters(), "pipe_parallel_size": 2}
    for hparams, kind in ((hyperparameters(), "pipeline"), (cut, "pipeline"), (cut, "")):
        for found in two_ranks.run(build, tmp_path, hparams, kind):
            assert "engine = 'ddp': torch's DistributedDataParallel holds the whole model" in str(found)
