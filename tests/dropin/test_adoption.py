"""What hyperparameters leave open is read from the first engine; what they state must agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks

ENGINE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
PIPED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": ENGINE["optimizer"]}


def opened(hparams: Any, config: dict[str, Any], run_dir: Path, kind: str = "Replicated") -> dict[str, Any]:
    """In a rank: what a context says before an engine is wrapped, and after."""
    from determined_ds import ConfigError, open_context
    from tests.dropin import trials

    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        said: dict[str, Any] = {"before": _described(context)}
        try:
            getattr(trials, kind)(context, config)
        except ConfigError as error:
            return {**said, "error": str(error)}
        said["after"] = _described(context)
    said["written"] = json.loads((run_dir / "deepspeed_config.json").read_text())
    return said


def _described(context: Any) -> Any:
    from determined_ds import ConfigError

    try:
        resolved = context.resolved
    except ConfigError as error:
        return [problem.code for problem in error.problems]
    sizes = (context.get_global_batch_size(), context.get_per_slot_batch_size())
    return *sizes, resolved.batch.micro_batch_size, resolved.topology.pipe_parallel_size, resolved.zero_stage


NOTHING = ["batch-missing", "undecided"]
# Ranks; hyperparameters; the engine's configuration and kind of trial -> sizes before there is an engine, and after:
# global batch, samples of a replica, micro-batch, stages, ZeRO stage.
ADOPTED: list[tuple[int, Any, dict[str, Any], str, Any, tuple[int, ...]]] = [
    (2, None, ENGINE, "Replicated", NOTHING, (16, 8, 4, 1, 1)),
    # Alone it would be a micro-batch of 8.
    (1, {"global_batch_size": 8}, ENGINE, "Replicated", (8, 8, 8, 1, 0), (8, 8, 4, 1, 1)),
    (2, None, PIPED, "TwoStages", NOTHING, (16, 16, 4, 2, 0)),
]


@pytest.mark.parametrize(("size", "hparams", "config", "kind", "before", "after"), ADOPTED)
def test_what_is_not_stated_is_of_the_engine(
    size: int,
    hparams: Any,
    config: dict[str, Any],
    kind: str,
    before: Any,
    after: tuple[int, ...],
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
) -> None:
    for found in (one_rank if size == 1 else two_ranks).run(opened, hparams, config, tmp_path, kind):
        assert (found["before"], found["after"]) == (before, after)
        assert found["written"] == {**config, "train_batch_size": after[0]} or kind == "TwoStages"


DIFFERS = "the engine that the trial wraps"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"global_batch_size": 32}, f"global_batch_size = 32 (hyperparameters): {DIFFERS} has 8"),
    ({"zero_stage": 2}, f"zero_stage = 2 (hyperparameters): {DIFFERS} has 1"),
    (
        {"partition_method": "measured"},
        f"partition_method = 'measured' (hyperparameters): {DIFFERS} was made",
    ),
]


@pytest.mark.parametrize(("stated", "said"), REFUSED)
def test_what_is_stated_otherwise_is_refused(
    one_rank: Ranks, stated: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (found,) = one_rank.run(opened, stated, ENGINE, tmp_path)
    assert said in found["error"]


def other_unit() -> str:
    """In a rank: what is said to a unit of other replicas."""
    from determined_ds import ConfigError, open_context
    from determined_ds import deepspeed as det_ds
    from tests.dropin import trials

    try:
        with open_context(accelerator="cpu") as context:
            trials.Replicated(context)
            context.set_mpu(det_ds.ModelParallelUnit(0, 2, True, True))
    except ConfigError as error:
        return str(error)
    return ""


def test_replicas_that_are_counted_otherwise_are_refused(one_rank: Ranks) -> None:
    (said,) = one_rank.run(other_unit)
    assert "mpu.data_parallel_world_size = 2: the engine averages gradients over 1 replica" in said
