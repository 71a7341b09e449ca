"""Strategies by their names: which experiment each makes of another, and which cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.forms import FORMS
from determined_ds.pipe.orders import SCHEDULES
from determined_ds.tune.variants import (
    Variant,
    named_variants,
    same_micro_batch,
)
from tests.tune.bases import CONST, CPU, CUDA, base_in, base_of

PIPELINE = Path("experiments/gpt2/pipeline.yaml")
# Strategy -> ZeRO stage, whether optimizer and parameters are offloaded, pipeline stages; on two slots.
MEANING = {
    "ddp": (0, False, False, 1),
    "zero0": (0, False, False, 1),
    "zero1": (1, False, False, 1),
    "zero2": (2, False, False, 1),
    "zero3": (3, False, False, 1),
    "zero1_offload": (1, True, False, 1),
    "zero2_offload": (2, True, False, 1),
    "zero3_offload_optimizer": (3, True, False, 1),
    "zero3_offload": (3, True, True, 1),
    "zeropp": (3, False, False, 1),
    "pipeline": (0, False, False, 2),
    "pipeline_zero1": (1, False, False, 2),
    **dict.fromkeys(SCHEDULES, (0, False, False, 2)),
    "single_gpu_simple": (0, False, False, 1),
    "single_gpu_offload": (2, True, False, 1),
}


def only(
    name: str,
    *,
    slots: int = 2,
    accelerator: Accelerator = CUDA,
    config: Path = CONST,
    overrides: tuple[str, ...] = (),
) -> Variant:
    [variant] = named_variants(base_of(config, *overrides, accelerator=accelerator), [name], [slots])
    return variant


# ---------------------------------------------------------------------------------------- what a name means


@pytest.mark.parametrize("name", FORMS)
def test_a_name_means_what_it_says(name: str) -> None:
    """By what DeepSpeed would be given."""
    variant = only(name)
    assert variant.resolved is not None, variant.reason
    stage, optimizer, param, stages = MEANING[name]
    zero = variant.resolved.ds_config["zero_optimization"]
    assert variant.resolved.zero_stage == stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (optimizer, param)
    assert variant.resolved.topology.pipe_parallel_size == stages
    assert ("zero_quantized_weights" in zero) == (name == "zeropp")
    assert variant.resolved.strategy.pipe_schedule == (name if name in SCHEDULES else "1f1b")
    assert variant.choice.engine == ("ddp" if name == "ddp" else "deepspeed")
    assert variant.choice.slots == (1 if name.startswith("single") else 2)


def test_every_strategy_has_a_meaning_here() -> None:
    assert set(MEANING) == set(FORMS)


def test_the_same_global_batch_on_every_number_of_slots() -> None:
    base = base_of(accelerator=CUDA)
    variants = named_variants(base, ["zero0", "zero3", "pipeline"], [2, 4, 8])
    assert len(variants) == 9
    for variant in variants:
        assert variant.resolved is not None, variant.reason
        assert variant.resolved.batch.global_batch_size == 32
        assert variant.resolved.topology.slots == variant.choice.slots


@given(st.integers(1, 256), st.integers(1, 64), st.integers(1, 8))
def test_the_micro_batch_stays_as_far_as_it_divides(global_batch: int, micro: int, slots: int) -> None:
    """The largest that is no larger than the experiment's own and fills a replica's share."""
    if global_batch % micro:
        return
    base = base_of(
        CONST,
        f"hyperparameters.global_batch_size={global_batch}",
        f"hyperparameters.overwrite_deepspeed_args.train_micro_batch_size_per_gpu={micro}",
        slots=1,
    )
    found = same_micro_batch(base, slots)
    share, rest = divmod(global_batch, slots)
    if rest:
        assert found is None
        return
    possible = [size for size in range(1, share + 1) if share % size == 0 and size <= micro]
    assert found == max(possible)


def test_the_micro_batch_of_a_pipeline_is_none_for_replicas() -> None:
    """It is one of many of a step; the replicas' is derived, as without one."""
    assert same_micro_batch(base_of(PIPELINE), 2) is None
    variant = only("zero0", config=PIPELINE)
    assert variant.resolved is not None
    assert variant.resolved.batch.micro_batch_size == 16


def test_a_pipeline_gets_four_micro_batches_a_stage_where_they_divide() -> None:
    counts = {}
    for slots in (2, 4, 8):
        variant = only("pipeline", slots=slots)
        assert variant.resolved is not None
        counts[slots] = variant.resolved.batch.accumulation
    assert counts == {2: 8, 4: 16, 8: 32}
    odd = only("pipeline", overrides=("hyperparameters.global_batch_size=30",))
    assert odd.resolved is not None
    assert odd.resolved.batch.accumulation == 6  # of 30, the most up to 8


def test_a_pipeline_is_as_deep_as_the_experiments_own() -> None:
    """Where that divides the slots; else as deep as there are slots."""
    config = Path("experiments/gpt2/pipeline_zero1.yaml")
    depths = {}
    for slots in (2, 3, 4):
        variant = only(
            "pipeline_zero1", slots=slots, config=config, overrides=("hyperparameters.global_batch_size=24",)
        )
        depths[slots] = variant.choice.pipe_parallel_size
    assert depths == {2: 2, 3: 3, 4: 2}


# ------------------------------------------------------------------------------------------- schedules


def micro_batches(name: str, *, config: Path = PIPELINE, slots: int = 2, **hyperparameters: object) -> int:
    overrides = tuple(f"hyperparameters.{key}={value}" for key, value in hyperparameters.items())
    variant = only(name, slots=slots, config=config, overrides=overrides)
    assert variant.resolved is not None, variant.reason
    assert variant.resolved.strategy.pipe_schedule == name
    return variant.resolved.batch.accumulation


def test_a_schedule_is_that_of_the_experiments_own_pipeline() -> None:
    """Its stages, ZeRO stage and micro-batches stay; whatever it is scheduled by."""
    config = Path("experiments/gpt2/pipeline_zero1.yaml")
    by_another = ("hyperparameters.pipe_schedule=dualpipev", "hyperparameters.global_batch_size=48")
    accumulation = "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=6"
    for name in SCHEDULES:
        variant = only(name, slots=4, config=config, overrides=(*by_another, accumulation))
        assert variant.resolved is not None, variant.reason
        strategy = variant.resolved.strategy
        assert (strategy.pipe_schedule, strategy.zero_stage) == (name, 1)
        assert (strategy.pipe_parallel_size, strategy.replicas, strategy.accumulation) == (2, 2, 6)
        assert strategy.pipe_chunks == (2 if name in ("interleaved", "dualpipev") else 1)


def test_micro_batches_that_a_schedule_cannot_order_become_the_nearest_that_it_can() -> None:
    """Of those that keep the global batch: the most below, or else the fewest above."""
    accumulated = {"overwrite_deepspeed_args.gradient_accumulation_steps": 3, "global_batch_size": 36}
    assert micro_batches("zb-h1", **accumulated) == 3
    assert micro_batches("interleaved", **accumulated) == 2
    assert micro_batches("dualpipev", **accumulated) == 4


def test_without_micro_batches_that_do_a_schedule_is_refused_with_what_it_needs() -> None:
    accumulation = "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=3"
    odd = only(
        "interleaved", config=PIPELINE, overrides=("hyperparameters.global_batch_size=9", accumulation)
    )
    assert "2 chunks need a multiple of 2 micro-batches, not 3" in odd.reason
    [problem] = odd.problems
    assert "change micro_batch_size or global_batch_size" in problem.fix


def test_without_a_pipeline_nothing_is_said_of_a_schedule() -> None:
    """Which would be warned of, since there is one stage."""
    stated = ("hyperparameters.pipe_schedule=interleaved", "hyperparameters.pipe_chunks=2")
    variant = only("zero1", config=PIPELINE, overrides=stated)
    assert variant.document is not None
    assert {"pipe_schedule", "pipe_chunks"}.isdisjoint(variant.document.data["hyperparameters"])
    kept = only("pipeline", config=PIPELINE, overrides=stated)
    assert kept.resolved is not None
    assert (kept.resolved.strategy.pipe_schedule, kept.resolved.strategy.pipe_chunks) == ("interleaved", 2)


# ------------------------------------------------------------------------------------------- what there is


def test_every_name_on_every_number_of_slots_once() -> None:
    base = base_of(accelerator=CUDA)
    variants = named_variants(base, ["zero1", "single_gpu_simple", "zero1", "single_gpu_offload"], [1, 2, 1])
    assert [(variant.name, variant.choice.slots) for variant in variants] == [
        ("zero1", 1),
        ("zero1", 2),
        ("single_gpu_simple", 1),
        ("single_gpu_offload", 1),
    ]
    assert all(variant.can_run for variant in variants)


# -------------------------------------------------------------------------------------- what cannot be made


def test_a_pipeline_on_one_slot_cannot_run() -> None:
    for name in ("pipeline", "pipeline_zero1"):
        variant = only(name, slots=1)
        assert not variant.can_run
        assert "a pipeline needs two slots or more" in variant.reason
        assert variant.problems[0].fix == "--slots 2"


def test_zero_pp_on_a_cpu_cannot_run() -> None:
    variant = only("zeropp", accelerator=CPU)
    assert not variant.can_run
    assert "ZeRO++ quantization runs in CUDA kernels, and there is no CUDA device" in variant.reason
    assert variant.reason.count("no CUDA device") == 1


def test_a_trial_without_stages_cannot_be_a_pipeline() -> None:
    variant = only("pipeline", config=Path("experiments/bert/const.yaml"))
    assert not variant.can_run
    assert "BertTrial has no stages" in variant.reason


def test_slots_that_the_batch_does_not_divide_by_cannot_run() -> None:
    variant = only("zero1", slots=3)
    assert not variant.can_run
    assert "global_batch_size" in variant.reason


# --------------------------------------------------------------------------------------- trials by hand

BY_HAND = """
name: by hand
entrypoint: python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:ByHand
resources: {slots_per_trial: 2}
hyperparameters:
  global_batch_size: 8
  deepspeed_config: {type: const, val: {optimizer: {type: Adam, params: {lr: 0.1}}}}
  fit: {max_length: {batches: 4}}
searcher: {name: single, metric: validation_loss}
"""


def test_ddp_of_a_trial_by_hand_cannot_run(tmp_path: Path) -> None:
    """DeepSpeed would train, since the trial calls it by itself: known before a process is started."""
    source = "from determined.pytorch.deepspeed import DeepSpeedTrial\nclass ByHand(DeepSpeedTrial): ...\n"
    (tmp_path / "trial.py").write_text(source)
    base = base_in(tmp_path, BY_HAND)
    ddp, zero1 = named_variants(base, ["ddp", "zero1"], [2])
    assert not ddp.can_run
    assert "ByHand calls deepspeed.initialize itself, so it cannot be trained by ddp" in ddp.reason
    assert zero1.can_run
