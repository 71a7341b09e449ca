"""What is decided, DeepSpeed reads as it was meant; what DeepSpeed would refuse is refused before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import Accelerator, ConfigError
from tests.package import CPU, CUDA, OLD_CUDA, decide, rules

SMALL = st.sampled_from([1, 2, 3, 4, 8])
# fmt: off
SETTINGS = {
    "fp16": st.fixed_dictionaries({"enabled": st.sampled_from([True, False, "auto"])}, optional={
        "loss_scale": st.sampled_from([0, 128]), "loss_scale_window": st.sampled_from([1, 100])}),
    "bf16": st.fixed_dictionaries({"enabled": st.sampled_from([True, False, "auto"])}),
    "gradient_allreduce_op": st.sampled_from(["mean", "auto"]),
    "gradient_clipping": st.sampled_from([0, 0.5, "auto"]),
    "steps_per_print": st.sampled_from([1, 10, None, "auto"]),
    "scheduler": st.sampled_from([
        {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}}, {"type": "WarmupDecayLR"},
        {"type": "LRRangeTest"}, {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}]),
    "data_types": st.fixed_dictionaries({"grad_accum_dtype": st.sampled_from(["fp32", "bf16", None, "auto"])}),
}
OFFLOAD = st.fixed_dictionaries({"device": st.sampled_from(["none", "cpu", "nvme"])}, optional={
    "pin_memory": st.just("auto"), "nvme_path": st.just("/nvme")})
# fmt: on
ZERO = {
    "offload_optimizer": st.none() | OFFLOAD.map(lambda offload: {**offload, "ratio": 1}),
    "offload_param": st.none() | OFFLOAD,
    "reduce_bucket_size": st.sampled_from([5e8, 1000, "auto"]),
    "overlap_comm": st.sampled_from([True, False, None, "auto"]),
    "zero_hpz_partition_size": SMALL,
    "zero_quantized_weights": st.booleans(),
}


def few(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the settings, so few that they often go together."""
    keys = st.lists(st.sampled_from(sorted(options)), max_size=2, unique=True)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: options[key] for key in chosen}))


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    """A topology and a batch that agree, and settings of which some exclude each other."""
    model, data, micro, steps = (draw(SMALL) for _ in range(4))
    pipe = draw(st.sampled_from([1, 1, 1, 2, 4]))
    hp: dict[str, Any] = {"pipe_parallel_size": pipe, "model_parallel_size": model, "learning_rate": 0.1}
    hp["fit"] = {"max_length": {"batches": 20}}
    batch = {"train_batch_size": micro * steps * data, "train_micro_batch_size_per_gpu": micro}
    batch["gradient_accumulation_steps"] = steps
    known = draw(
        st.sampled_from([("train_batch_size", "gradient_accumulation_steps"), tuple(batch), tuple(batch)[:2]])
    )
    ds: dict[str, Any] = {
        key: batch[key] if key in known else draw(st.sampled_from(["auto", None])) for key in batch
    }
    if draw(st.booleans()):
        hp["global_batch_size"] = ds.pop("train_batch_size")
    if draw(st.booleans()):
        hp["data_parallel_world_size"] = draw(st.sampled_from([data, "auto"]))
    ds |= draw(few(SETTINGS))
    ds["optimizer"] = {
        "type": draw(st.sampled_from(["AdamW", "adam", "SGD", "Lamb"])),
        "params": {"lr": "auto"},
    }
    ds["zero_optimization"] = {
        "stage": draw(st.sampled_from([0, 1, 2, 2.0, 3, 3, "auto"])),
        **draw(few(ZERO)),
    }
    expected = {"batch": batch, "replicas": data, "slots": pipe * model * data}
    return {"hp": hp, "ds": ds, "accelerator": draw(st.sampled_from([CPU, CUDA, OLD_CUDA])), **expected}


@given(setup=setups())
def test_what_is_accepted_deepspeed_accepts_with_the_same_batch(
    setup: dict[str, Any], deepspeed_config: Callable[..., Any]
) -> None:
    big = Accelerator(**{**vars(setup["accelerator"]), "num_devices": 512})
    try:
        resolved = decide(setup["hp"], setup["ds"], slots=setup["slots"], accelerator=big)
    except ConfigError as refused:
        codes = {problem.code for problem in refused.problems}
        assert codes <= {rule.code for rule in rules()}, "the sizes agree: only a rule can be broken"
        return
    told = json.loads(json.dumps(resolved.ds_config, allow_nan=False))
    assert told == resolved.ds_config
    assert {key: told[key] for key in setup["batch"]} == setup["batch"]
    assert resolved.topology.data_parallel_world_size == setup["replicas"]
    theirs = deepspeed_config(told, setup["replicas"])
    assert {key: getattr(theirs, key) for key in setup["batch"]} == setup["batch"]
    assert int(theirs.zero_optimization_stage) == resolved.zero_stage
    assert theirs.gradient_clipping == resolved.ds_config["gradient_clipping"]
    assert theirs.bfloat16_config.enabled == resolved.ds_config.get("bf16", {}).get("enabled", False)


@pytest.mark.parametrize(
    ("ds", "says"),
    [
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "gradient_allreduce_op='sum'"),
        ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "compute_grad_norm=false"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "Partial offload"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "Bf16_master_weights_and_grads"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_optimizer_states"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window must be > 0"),
    ],
)  # fmt: skip
def test_what_is_left_to_deepspeed_it_refuses_in_words_that_name_the_key(
    ds: dict[str, Any], says: str, deepspeed_config: Callable[..., Any]
) -> None:
    """There is no rule of ours for it."""
    decide("global_batch_size: 2", ds, accelerator=CUDA)
    with pytest.raises((AssertionError, ValueError), match=says):
        deepspeed_config({"train_batch_size": 2, **ds}, 2)
