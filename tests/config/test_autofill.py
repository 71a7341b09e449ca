"""What "auto" and absence stand for: a hyperparameter, the accelerator, or DeepSpeed's default; and who filled it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Accelerator, ResolvedConfig
from tests.config.deciding import AUTO, value
from tests.package import CPU, CUDA, OLD_CUDA, decide, refusals

Json = dict[str, Any]
LR, DECAY, BETAS, ADAM, FUSED = (
    f"optimizer.params.{name}" for name in ("lr", "weight_decay", "betas", "torch_adam", "fused")
)
PEAK, START, WARM_UP, TOTAL = (
    f"scheduler.params.{name}"
    for name in ("warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "total_num_steps")
)
CLIPPING, PINNED = "gradient_clipping", "zero_optimization.offload_optimizer.pin_memory"
DTYPE, TIMER = "data_types.grad_accum_dtype", "timers.throughput.enabled"


def fill(ds: Json, hp: str = "", *, accelerator: Accelerator = CPU, pipe: int = 1) -> ResolvedConfig:
    """A decision of two replicas; the hyperparameters begin in line 1."""
    sizes = f"global_batch_size: 8\npipe_parallel_size: {pipe}"
    return decide(f"{hp}\n{sizes}", ds, slots=2 * pipe, accelerator=accelerator)


def optimizer(kind: str = "AdamW", **params: Any) -> Json:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str = "WarmupLR", **params: Any) -> Json:
    return {"scheduler": {"type": kind, "params": params}}


def zero(**settings: Any) -> Json:
    return {"zero_optimization": {"stage": 1, **settings}}


def precision(**enabled: Any) -> Json:
    return {section: {"enabled": on} for section, on in enabled.items()}


# What is written, a hyperparameter -> what DeepSpeed is given at a key.
FILLED: list[tuple[Json, str, str, Any]] = [
    (optimizer(lr=AUTO), "learning_rate: 0.01", LR, 0.01),
    (optimizer(lr=AUTO), "lr: 0.01", LR, 0.01),
    (optimizer(lr=AUTO), "learning_rate: 1.0e-3\nlr: 1", LR, 0.001),
    (optimizer(lr=1, eps=AUTO), "adam_epsilon: 1e-6", "optimizer.params.eps", 1e-6),
    (optimizer(lr=1, weight_decay=AUTO), "weight_decay: 0.1", DECAY, 0.1),
    (optimizer(lr=1, betas=AUTO), "betas: [0.9, 0.95]", BETAS, [0.9, 0.95]),
    (optimizer(lr=1, betas=AUTO), "adam_beta1: 0.8\nadam_beta2: 0.9", BETAS, [0.8, 0.9]),
    (scheduler(warmup_max_lr=AUTO), "learning_rate: 0.1", PEAK, 0.1),
    ({CLIPPING: AUTO}, "max_grad_norm: 0.5", CLIPPING, 0.5),
    ({"steps_per_print": AUTO}, "steps_per_print: 10", "steps_per_print", 10),
    # DeepSpeed would silently take its own default, though the experiment states another value.
    (optimizer(), "learning_rate: 0.01", LR, 0.01),
    (optimizer(), "weight_decay: 0.1", DECAY, 0.1),
    (optimizer(), "betas: [0.9, 0.95]", BETAS, [0.9, 0.95]),
    (scheduler(), "learning_rate: 0.01", PEAK, 0.01),
    (scheduler(), "warmup_num_steps: 5", WARM_UP, 5),
    (scheduler("WarmupDecayLR", warmup_max_lr=1), "fit: {max_length: {batches: 9}}", TOTAL, 9),
    ({}, "max_grad_norm: 0.5", CLIPPING, 0.5),
]


@pytest.mark.parametrize(("ds", "hp", "key", "filled"), FILLED)
def test_a_hyperparameter_fills_auto_and_what_is_absent(ds: Json, hp: str, key: str, filled: Any) -> None:
    resolved = fill(ds, hp)
    assert value(resolved, key) == filled
    assert resolved.origins[key] == f"{hp.partition(':')[0]}{'.max_length' * (key == TOTAL)}, hp.yaml:1"
    assert AUTO not in str(resolved.ds_config)


@pytest.mark.parametrize(
    ("ds", "key", "given"),
    [
        # ---- only what an optimizer takes is added to it
        ({}, "optimizer.params", None),
        (optimizer("SGD"), "optimizer.params", {"lr": 0.5}),
        (optimizer("Adagrad"), "optimizer.params", {"lr": 0.5, "weight_decay": 0.1}),
        (scheduler("StepLR", step_size=2), "scheduler.params", {"step_size": 2}),
        # ---- a warm-up starts with its first step: its share of the peak that is really used
        (scheduler(warmup_min_lr=AUTO), START, 0.05),
        (scheduler("WarmupDecayLR", warmup_min_lr=AUTO), START, 0.05),
        (scheduler(warmup_min_lr=AUTO, warmup_max_lr=1.0, warmup_num_steps=4), START, 0.25),
        (scheduler(warmup_min_lr=0.2), START, 0.2),
    ],
)
def test_what_is_filled_depends_on_what_is_there(ds: Json, key: str, given: Any) -> None:
    hp = "learning_rate: 0.5\nweight_decay: 0.1\nbetas: [0.9, 0.9]\nwarmup_num_steps: 10"
    assert value(fill(ds, f"{hp}\nfit: {{max_length: {{batches: 50}}}}"), key) == given


@pytest.mark.parametrize(
    ("ds", "hp", "key", "fix"),
    [
        (optimizer(lr=AUTO), "", LR, "hyperparameter learning_rate"),
        (optimizer(lr=AUTO), "learning_rate: auto", LR, "hyperparameter learning_rate"),
        (scheduler(warmup_max_lr=AUTO), "", PEAK, "hyperparameter learning_rate"),
        (scheduler(warmup_num_steps=AUTO), "", WARM_UP, "hyperparameter warmup_num_steps"),
        (scheduler("WarmupDecayLR", warmup_max_lr=1), "", TOTAL, "fit.max_length in batches"),
        (scheduler("WarmupCosineLR"), "fit: {max_length: {epochs: 1}}", TOTAL, "fit.max_length in batches"),
        (scheduler(warmup_max_lr=[AUTO, 1]), "learning_rate: 1", f"{PEAK}.0", "whole value"),
    ],
)
def test_an_auto_that_nothing_determines_is_refused(ds: Json, hp: str, key: str, fix: str) -> None:
    problem = next(each for each in refusals(lambda: fill(ds, hp)) if each.key == key)
    assert problem.code == "auto-undetermined"
    assert fix in problem.fix


def test_what_deepspeed_has_a_default_for_is_left_to_it_unless_it_surprises() -> None:
    """DeepSpeed clips unless it is told not to; its own AdamW would take no weight decay, and torch's 0.01."""
    import deepspeed.runtime.constants as upstream

    resolved = fill({**optimizer(lr=1, betas=AUTO, eps=AUTO), **zero(stage=AUTO), "steps_per_print": AUTO})
    assert value(resolved, "optimizer.params") == {"lr": 1, "torch_adam": True}
    assert not {"zero_optimization", "steps_per_print"} & resolved.ds_config.keys()
    resolved = fill(optimizer(lr=1, weight_decay=AUTO))
    assert (value(resolved, DECAY), resolved.origins[DECAY]) == (0.0, "no weight decay is stated")
    for ds in ({}, {CLIPPING: AUTO}):
        assert value(fill(ds), CLIPPING) == upstream.GRADIENT_CLIPPING_DEFAULT
        assert fill(ds).origins[CLIPPING] == "DeepSpeed's default"
    assert value(fill({CLIPPING: 0}), CLIPPING) == 0


CPU_OFFLOAD = {"device": "cpu", "pin_memory": AUTO}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
BF16 = {**precision(bf16=AUTO), **zero()}
# What is written, on what, stages of a pipeline -> what DeepSpeed is given of it.
ON: list[tuple[Json, Accelerator, int, Json]] = [
    # ---- precision
    ({"bf16": AUTO}, CUDA, 1, {"bf16.enabled": True, "fp16.enabled": None}),
    (precision(bf16=AUTO), CPU, 1, {"bf16.enabled": False, "fp16.enabled": None}),
    (precision(bf16=AUTO), OLD_CUDA, 1, {"bf16.enabled": False, "fp16.enabled": None}),
    (precision(bf16=AUTO, fp16=AUTO), CUDA, 1, {"bf16.enabled": True, "fp16.enabled": False}),
    (precision(bf16=AUTO, fp16=AUTO), OLD_CUDA, 1, {"bf16.enabled": False, "fp16.enabled": True}),
    (precision(bf16=AUTO, fp16=True), CUDA, 1, {"bf16.enabled": False, "fp16.enabled": True}),
    (precision(fp16=AUTO), CUDA, 1, {"bf16.enabled": None, "fp16.enabled": True}),
    (precision(bf16=True), CPU, 1, {"bf16.enabled": True}),
    # ---- a bf16 pipeline accumulates in fp32
    (BF16, CUDA, 2, {DTYPE: "fp32"}),
    (BF16, CUDA, 1, {DTYPE: None}),
    ({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, CUDA, 2, {DTYPE: "bf16"}),
    # ---- memory is pinned for CUDA only
    (zero(offload_optimizer=CPU_OFFLOAD), CPU, 1, {PINNED: False}),
    (zero(offload_optimizer=CPU_OFFLOAD), CUDA, 1, {PINNED: True}),
    # ---- Adam is torch's, so that nothing has to be compiled before the first step; on GPUs the fused one
    (optimizer("Adam", lr=1), CPU, 1, {ADAM: True, FUSED: None}),
    (optimizer("Lamb", lr=1), CPU, 1, {ADAM: None, FUSED: None}),
    (optimizer("Adam", lr=1), CUDA, 1, {ADAM: True, FUSED: True}),
    ({**optimizer(lr=1), **zero(offload_optimizer={"device": "none"})}, CUDA, 1, {ADAM: True, FUSED: True}),
    (optimizer(lr=1, torch_adam=True), CUDA, 1, {ADAM: True, FUSED: None}),
    (optimizer(lr=1, fused=False), CUDA, 1, {ADAM: True, FUSED: False}),
    (optimizer(lr=1, foreach=True), CUDA, 1, {ADAM: True, FUSED: None}),  # torch takes one of the two
    (optimizer(lr=1, bias_correction=False), CUDA, 1, {ADAM: None, FUSED: None}),  # torch's has none
    ({**optimizer(lr=1), **zero(stage=3, offload_optimizer=NVME)}, CUDA, 1, {ADAM: None, FUSED: None}),
    (optimizer("Lamb", lr=1), CUDA, 1, {ADAM: None, FUSED: None}),
    # ---- no timer waits for a GPU unless it is asked for
    ({"timers": {}, "wall_clock_breakdown": True}, CUDA, 1, {TIMER: False}),
    ({"steps_per_print": 10}, CUDA, 1, {TIMER: None}),
    ({"timers": {"throughput": {"enabled": True}}}, CUDA, 1, {TIMER: True}),
]


@pytest.mark.parametrize(("ds", "accelerator", "pipe", "given"), ON)
def test_the_accelerator_fills_what_depends_on_it(
    ds: Json, accelerator: Accelerator, pipe: int, given: Json
) -> None:
    resolved = fill(ds, accelerator=accelerator, pipe=pipe)
    assert {key: value(resolved, key) for key in given} == given
    for key in given.keys() & resolved.origins.keys() - {DTYPE}:
        assert resolved.origins[key] in (f"the accelerator: {accelerator.name}", "ds.json")
