"""Several engines in a trial: each has its own DeepSpeed configuration, and all share the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.ranks import ROOT, Ranks
from tests.trial.regression import trial_class

JSON = ROOT / "experiments/deepspeed/zero1.json"
HYPERPARAMETERS: dict[str, Any] = {
    "global_batch_size": 16,
    "deepspeed_config": str(JSON),
    "learning_rate": 0.1,
    "warmup_num_steps": 2,
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2, "gradient_clipping": 3.0},
}


def build(run_dir: Path, more: dict[str, Any]) -> Any:
    """In a rank: what a trial of two engines is given, or why there is none."""
    from determined_ds import ConfigError, open_context

    with open_context(hparams={**HYPERPARAMETERS, **more}, run_dir=run_dir, accelerator="cpu") as context:
        try:
            trial = trial_class("engines")(context)
        except ConfigError as error:
            return str(error)
        first, second = trial.engines.values()
        return {
            "configs": trial.ds_configs,
            "engines": (trial.engine is first, context.models == [first, second]),
            "compiled": [engine.is_compiled for engine in (first, second)],
            "accumulation": [engine.gradient_accumulation_steps() for engine in (first, second)],
        }


def test_engines_are_alike_unless_told(one_rank: Ranks, tmp_path: Path) -> None:
    """A learning rate goes wherever "auto" asks for one, and an engine's arguments over the shared ones."""
    (found,) = one_rank.run(build, tmp_path, {"torch_compile": True})
    writer, critic = found["configs"].values()
    assert list(found["configs"]) == ["writer", "critic"]
    assert writer == critic
    assert (writer["train_batch_size"], writer["optimizer"]["params"]["lr"]) == (16, 0.1)
    assert (found["engines"], found["compiled"]) == ((True, True), [True, True])
    assert found["accumulation"] == [2, 2]
    more = {
        "critic_learning_rate": 0.2,
        "critic_overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}},
        "writer_deepspeed_config": str(JSON.with_name("pipeline.json")),
    }
    (found,) = one_rank.run(build, tmp_path, more)
    configs = found["configs"].values()
    assert [each["optimizer"]["params"]["lr"] for each in configs] == [0.1, 0.2]
    assert [each["zero_optimization"]["stage"] for each in configs] == [0, 2]
    assert [each["gradient_clipping"] for each in configs] == [3.0, 3.0]
    more = {"critic_overwrite_deepspeed_args": {"gradient_accumulation_steps": 4}}
    (refused,) = one_rank.run(build, tmp_path, more)
    assert "makes other micro-batches for the critic" in refused
