"""A strategy by its name changes how an experiment is carried out, and nothing of what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import ConfigError
from tests.package import EXPERIMENTS, ROOT, check, refusals, under_strategy

GPT2 = ROOT / "experiments" / "gpt2"
CONST, PIPELINE = GPT2 / "const.yaml", GPT2 / "pipeline.yaml"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")
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
}
OF_STRATEGY = ("deepspeed_config", "overwrite_deepspeed_args", "data_parallel_world_size", "zero_stage")
OF_STRATEGY += ("pipe_parallel_size", "pipe_schedule", "pipe_chunks", "partition_method")


def settings(**values: Any) -> tuple[str, ...]:
    return tuple(f"hyperparameters.{name.replace('__', '.')}={value}" for name, value in values.items())


@pytest.mark.parametrize("name", MEANING)
def test_a_name_means_what_it_says_and_the_optimizer_stays(name: str, tmp_path: Path) -> None:
    """By what DeepSpeed would be given; what steps with the optimizer stays too, and ``check`` finds no error."""
    (_, before), (made, resolved) = (under_strategy(CONST, each) for each in ("zero1", name))
    stage, optimizer, param, stages = MEANING[name]
    zero = resolved.ds_config["zero_optimization"]
    assert resolved.zero_stage == stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (optimizer, param)
    assert (resolved.topology.pipe_parallel_size, resolved.topology.slots) == (stages, 2)
    assert ("zero_quantized_weights" in zero) == (name == "zeropp")
    assert resolved.strategy.pipe_schedule == (name if name in SCHEDULES else "1f1b")
    for key in ("scheduler", "gradient_clipping", "train_batch_size"):
        assert resolved.ds_config.get(key) == before.ds_config.get(key)
    params = [{**each.ds_config["optimizer"]["params"]} for each in (before, resolved)]
    for each in params:
        for kernel in ("torch_adam", "fused"):  # which of them is used follows from where the states are
            each.pop(kernel, None)
    assert params[0] == params[1]
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(made))
    [report] = check([path], context_dir=ROOT)
    assert not [finding for finding in report.findings if finding.severity == "error"]


@given(
    st.sampled_from([path for path in EXPERIMENTS if "hf_trainer" not in str(path)]),
    st.sampled_from(list(MEANING)),
    st.sampled_from([1, 2, 4, 8]),
)
def test_everything_else_of_the_experiment_stays(config: Path, name: str, slots: int) -> None:
    """Model, data, seed, length, global batch. Or it is refused with reasons."""
    try:
        made, resolved = under_strategy(config, name, slots=slots)
    except ConfigError:
        return
    before = yaml.safe_load(config.read_text())
    batch = resolved.batch
    assert batch.micro_batch_size * batch.accumulation * batch.replicas == batch.global_batch_size
    assert batch.global_batch_size == before["hyperparameters"]["global_batch_size"]
    assert made["resources"]["slots_per_trial"] == slots
    for key in ("data", "reproducibility", "environment"):
        assert made.get(key) == before.get(key)
    if before["searcher"]["name"] == "single":
        assert made["searcher"] == before["searcher"]
        for each in (made, before):
            for key in OF_STRATEGY:
                each["hyperparameters"].pop(key, None)
        assert made["hyperparameters"] == before["hyperparameters"]


def test_the_micro_batch_is_the_largest_up_to_the_experiments_own_that_divides() -> None:
    def micro(global_batch: int, own: int, slots: int) -> int:
        sizes = {"overwrite_deepspeed_args__train_micro_batch_size_per_gpu": own}
        given = (*settings(global_batch_size=global_batch, **sizes), "resources.slots_per_trial=1")
        return under_strategy(CONST, "zero0", *given, slots=slots)[1].batch.micro_batch_size

    assert micro(24, 8, 1) == 8
    assert micro(24, 8, 4) == 6
    assert micro(36, 12, 6) == 6
    assert refusals(lambda: micro(24, 8, 5))


def test_a_pipeline_gets_four_micro_batches_a_stage_where_they_divide_and_replicas_get_their_own() -> None:
    for slots, count in {2: 8, 4: 16, 8: 32}.items():
        assert under_strategy(CONST, "pipeline", slots=slots)[1].batch.accumulation == count
    made, odd = under_strategy(CONST, "pipeline", *settings(global_batch_size=30))
    assert odd.batch.accumulation == 6  # of 30, the most up to 8
    assert made["entrypoint"].endswith(":GPT2PipelineTrial")
    made, resolved = under_strategy(PIPELINE, "zero0")  # whose micro-batch is not one of many of a step
    assert made["entrypoint"].endswith("model_defs.gpt2.trial:GPT2Trial")
    assert (resolved.batch.micro_batch_size, resolved.topology.data_parallel_world_size) == (16, 2)
    assert not {"pipe_schedule", "pipe_chunks"} & made["hyperparameters"].keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_the_experiments_own_pipeline(name: str) -> None:
    """Its stages, ZeRO stage and micro-batches stay; whatever it is scheduled by."""
    own = settings(pipe_schedule="dualpipev", zero_stage=1, global_batch_size=48)
    own += settings(overwrite_deepspeed_args__gradient_accumulation_steps=6)
    strategy = under_strategy(PIPELINE, name, *own, slots=4)[1].strategy
    assert (strategy.pipe_schedule, strategy.zero_stage) == (name, 1)
    assert (strategy.pipe_parallel_size, strategy.replicas, strategy.accumulation) == (2, 2, 6)
    assert strategy.pipe_chunks == (2 if name in ("interleaved", "dualpipev") else 1)


@pytest.mark.parametrize(("name", "micro_batches"), [("zb-h1", 3), ("interleaved", 2), ("dualpipev", 4)])
def test_micro_batches_that_a_schedule_cannot_order_become_the_nearest_that_it_can(
    name: str, micro_batches: int
) -> None:
    """Of those that keep the global batch: the most below, or else the fewest above."""
    own = settings(global_batch_size=36, overwrite_deepspeed_args__gradient_accumulation_steps=3)
    assert under_strategy(PIPELINE, name, *own)[1].batch.accumulation == micro_batches
