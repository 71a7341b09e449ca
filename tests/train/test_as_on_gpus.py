"""What a GPU is given trains on a CPU that is said to have fp16; no number is read in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import Ranks
from tests.package import CUDA, decide, records, train_in_fp16_on_cpus
from tests.trial import regression

ACCUMULATION, NUM_BATCHES = 2, 6
READING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}


def of_gpus(stage: int, **sections: Any) -> dict[str, Any]:
    """All that DeepSpeed is given on one GPU."""
    ds = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        **sections,
    }
    return decide({"global_batch_size": 8}, ds, slots=1, accelerator=CUDA).ds_config


def train(
    run_dir: Path | None, ds_config: dict[str, Any], kind: str = "", batches: int = NUM_BATCHES, **how: Any
) -> tuple[int, int]:
    """In a rank: how often the device is synchronized, and a tensor's number read, from the first batch on."""
    from deepspeed.accelerator import get_accelerator

    train_in_fp16_on_cpus()
    synchronize = mock.patch.object(type(get_accelerator()), "synchronize").start()
    read: list[str] = []
    entered: list[Any] = []

    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.extend([name] if (name := func.overloadpacket.__name__) in READING else [])
            return func(*args, **(kwargs or {}))

    class Counting:
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if not entered:
                synchronize.reset_mock()
                entered.append(Reading().__enter__())
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)  # type: ignore[misc]

    hparams = {"pipe_parallel_size": 2 if kind else 1, "deepspeed_config": ds_config}
    regression.train(run_dir, regression.trial_class(kind, Counting), hparams, steps=batches, **how)
    return synchronize.call_count, len(read)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_fp16_reports_its_loss_scale_and_no_norm_of_a_skipped_step(
    stage: int, one_rank: Ranks, tmp_path: Path
) -> None:
    """The first scales overflow; each optimizer of DeepSpeed's keeps the scale in a place of its own."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    one_rank.run(train, tmp_path, of_gpus(stage, fp16=fp16))
    reports = [report for _, report in records(tmp_path, "training")]
    assert len(reports) == NUM_BATCHES
    assert reports[0]["skipped_steps"] == 1
    assert "grad_norm" not in reports[0]
    assert reports[-1]["skipped_steps"] < NUM_BATCHES
    assert 0 < reports[-1]["grad_norm"] < float("inf")
    assert reports[-1]["loss_scale"] == 2.0 ** (18 - reports[-1]["skipped_steps"])


def test_fp16_without_zero_is_the_same_training_as_with_it(one_rank: Ranks, tmp_path: Path) -> None:
    """By SGD, which shows the size of a gradient that Adam hides: what is divided by a scale was multiplied by it."""
    how = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}, "zero_allow_untested_optimizer": True}
    how |= {"fp16": {"enabled": True, "initial_scale_power": 10}, "gradient_clipping": 0.1}
    found = []
    for stage in (0, 1):
        one_rank.run(train, tmp_path / str(stage), of_gpus(stage, **how))
        found.append([report for _, report in records(tmp_path / str(stage), "training")])
    for name in ("loss", "grad_norm", "loss_scale"):
        expected = [report[name] for report in found[1]]
        assert [report[name] for report in found[0]] == pytest.approx(expected, rel=0.01), name


# What DeepSpeed 0.19.8 reads by itself in a step: whether gradients and their norm are finite, norms without ZeRO.
BY_DEEPSPEED = {0: 9, 1: 3, 3: 1}
PIPELINE = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "gradient_accumulation_steps": ACCUMULATION,
}


@pytest.mark.parametrize("case", [0, 1, 3, "pipeline", "ddp"])
def test_no_step_waits_and_no_batch_is_read_between_reports(
    case: Any, one_rank: Ranks, two_ranks: Ranks
) -> None:
    """Eight batches before the one report are read as often as four, but for what DeepSpeed reads."""
    stage = case if isinstance(case, int) else 0
    how = {"reporting_period": ("batches", 100), "engine": "ddp" if case == "ddp" else "deepspeed"}
    ranks, kind, ds_config = one_rank, "", of_gpus(stage, bf16={"enabled": True}, gradient_clipping=1.0)
    if case == "pipeline":
        ranks, kind, ds_config = two_ranks, "pipeline", PIPELINE
    few, many = (ranks.run(train, None, ds_config, kind, batches, **how) for batches in (4, 8))
    for (waits, before), (more_waits, after) in zip(few, many, strict=True):
        assert waits == more_waits
        # Whether to stop is asked by the clock: on a busy machine once or twice between, and never at each batch.
        assert after - before <= 3 + (0 if case == "ddp" else 4 * BY_DEEPSPEED[stage])
