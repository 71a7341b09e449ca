"""What "auto" and absence stand for: a hyperparameter, the accelerator, or DeepSpeed's default; and who filled it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Accelerator, ResolvedConfig
from tests.config.deciding import AUTO, value
from tests.package import CPU, CUDA, OLD_CUDA, decide, refusals

LR, DECAY, BETAS, ADAM = (
    f"optimizer.params.{name}" for name in ("lr", "weight_decay", "betas", "torch_adam")
)
PEAK, START, WARM_UP, TOTAL = (
    f"scheduler.params.{name}"
    for name in ("warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "total_num_steps")
)
CLIPPING = "gradient_clipping"


def fill(
    ds: dict[str, Any], hp: str = "", *, accelerator: Accelerator = CPU, pipe: int = 1
) -> ResolvedConfig:
    """A decision of two replicas; the hyperparameters begin in line 1."""
    sizes = f"global_batch_size: 8\npipe_parallel_size: {pipe}"
    return decide(f"{hp}\n{sizes}", ds, slots=2 * pipe, accelerator=accelerator)


def optimizer(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# ------------------------------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize(
    ("ds", "hp", "key", "filled"),
    [
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
    ],
)
def test_a_hyperparameter_fills_auto_and_what_is_absent(
    ds: dict[str, Any], hp: str, key: str, filled: Any
) -> None:
    resolved = fill(ds, hp)
    assert value(resolved, key) == filled
    assert resolved.origins[key] == f"{hp.partition(':')[0]}{'.max_length' * (key == TOTAL)}, hp.yaml:1"
    assert AUTO not in str(resolved.ds_config)


@pytest.mark.parametrize(
    ("ds", "section", "params"),
    [
        ({}, "optimizer", None),
        (optimizer("SGD"), "optimizer", {"lr": 0.1}),
        (optimizer("Adagrad"), "optimizer", {"lr": 0.1, "weight_decay": 0.1}),
        (scheduler("StepLR", step_size=2), "scheduler", {"step_size": 2}),
    ],
)
def test_only_what_an_optimizer_takes_is_added_to_it(
    ds: dict[str, Any], section: str, params: dict[str, Any] | None
) -> None:
    hp = "learning_rate: 0.1\nweight_decay: 0.1\nbetas: [0.9, 0.9]"
    assert value(fill(ds, hp), f"{section}.params") == params


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
def test_an_auto_that_nothing_determines_is_refused(ds: dict[str, Any], hp: str, key: str, fix: str) -> None:
    problem = next(each for each in refusals(lambda: fill(ds, hp)) if each.key == key)
    assert problem.code == "auto-undetermined"
    assert fix in problem.fix


# --------------------------------------------------------------------------------------- DeepSpeed's defaults


def test_what_deepspeed_has_a_default_for_is_left_to_it() -> None:
    ds = {**optimizer(lr=1, betas=AUTO, eps=AUTO), "zero_optimization": {"stage": AUTO}}
    resolved = fill({**ds, "steps_per_print": AUTO})
    assert value(resolved, "optimizer.params") == {"lr": 1, "torch_adam": True}
    assert not {"zero_optimization", "steps_per_print"} & resolved.ds_config.keys()


def test_defaults_that_differ_or_surprise_are_written_out() -> None:
    """DeepSpeed clips unless it is told not to; its own AdamW would take no weight decay, and torch's 0.01."""
    import deepspeed.runtime.constants as upstream

    resolved = fill(optimizer(lr=1, weight_decay=AUTO))
    assert (value(resolved, DECAY), resolved.origins[DECAY]) == (0.0, "no weight decay is stated")
    for ds in ({}, {CLIPPING: AUTO}):
        assert value(fill(ds), CLIPPING) == upstream.GRADIENT_CLIPPING_DEFAULT
        assert fill(ds).origins[CLIPPING] == "DeepSpeed's default"
    assert value(fill({CLIPPING: 0}), CLIPPING) == 0


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warm_up_starts_with_its_first_step(kind: str) -> None:
    """Its share of the peak that is really used, wherever the peak comes from."""
    hp = "learning_rate: 0.5\nwarmup_num_steps: 10\nfit: {max_length: {batches: 50}}"
    assert value(fill(scheduler(kind, warmup_min_lr=AUTO), hp), START) == pytest.approx(0.05)
    stated = scheduler(kind, warmup_min_lr=AUTO, warmup_max_lr=1.0, warmup_num_steps=4)
    assert value(fill(stated, hp), START) == 0.25
    assert value(fill(scheduler(kind, warmup_min_lr=0.2), hp), START) == 0.2


# ------------------------------------------------------------------------------------------ the accelerator


@pytest.mark.parametrize(
    ("accelerator", "ds", "bf16", "fp16"),
    [
        (CPU, {"bf16": {"enabled": AUTO}}, False, None),
        (CUDA, {"bf16": {"enabled": AUTO}}, True, None),
        (OLD_CUDA, {"bf16": {"enabled": AUTO}}, False, None),
        (CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}, True, False),
        (OLD_CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}, False, True),
        (CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": True}}, False, True),
        (CUDA, {"fp16": {"enabled": AUTO}}, None, True),
        (CPU, {"bf16": {"enabled": True}}, True, None),
    ],
)
def test_precision_is_that_of_the_accelerator(
    accelerator: Accelerator, ds: dict[str, Any], bf16: Any, fp16: Any
) -> None:
    resolved = fill(ds, accelerator=accelerator)
    for section, on in (("bf16", bf16), ("fp16", fp16)):
        assert value(resolved, f"{section}.enabled") is on
        if ds.get(section) in (AUTO, {"enabled": AUTO}):
            assert resolved.origins[f"{section}.enabled"] == f"the accelerator: {accelerator.name}"


@pytest.mark.parametrize(
    ("pipe", "stated", "dtype"), [(2, None, "fp32"), (1, None, None), (2, "bf16", "bf16")]
)
def test_a_bf16_pipeline_accumulates_in_fp32(pipe: int, stated: str | None, dtype: str | None) -> None:
    ds = {
        "bf16": {"enabled": AUTO},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": stated},
    }
    assert value(fill(ds, accelerator=CUDA, pipe=pipe), "data_types.grad_accum_dtype") == dtype


@pytest.mark.parametrize(("accelerator", "pinned"), [(CPU, False), (CUDA, True)])
def test_memory_is_pinned_for_cuda_only(accelerator: Accelerator, pinned: bool) -> None:
    ds = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": AUTO}}}
    key = "zero_optimization.offload_optimizer.pin_memory"
    assert value(fill(ds, accelerator=accelerator), key) is pinned


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}


@pytest.mark.parametrize(
    ("accelerator", "ds", "torch_adam", "fused"),
    [
        # On a CPU torch's own, so that nothing has to be compiled before the first step.
        (CPU, optimizer("Adam", lr=1), True, None),
        (CPU, optimizer("Lamb", lr=1), None, None),
        # On GPUs torch's fused one, which needs no compiler either.
        (CUDA, optimizer("Adam", lr=1), True, True),
        (CUDA, {**optimizer(lr=1), "zero_optimization": {"offload_optimizer": {"device": "none"}}}, True, True),
        (CUDA, optimizer(lr=1, torch_adam=True), True, None),
        (CUDA, optimizer(lr=1, fused=False), True, False),
        (CUDA, optimizer(lr=1, foreach=True), True, None),  # torch takes one of the two
        (CUDA, optimizer(lr=1, bias_correction=False), None, None),  # which torch's Adam does not take
        (CUDA, {**optimizer(lr=1), "zero_optimization": OFFLOADED}, None, None),
        (CUDA, optimizer("Lamb", lr=1), None, None),
    ],
)  # fmt: skip
def test_adam_is_torchs_where_deepspeeds_would_have_to_be_compiled(
    accelerator: Accelerator, ds: dict[str, Any], torch_adam: Any, fused: Any
) -> None:
    resolved = fill(ds, accelerator=accelerator)
    assert (value(resolved, ADAM), value(resolved, "optimizer.params.fused")) == (torch_adam, fused)


@pytest.mark.parametrize(
    ("ds", "enabled"),
    [
        ({"timers": {}}, False),
        ({"steps_per_print": 10}, None),
        ({"timers": {"throughput": {"enabled": True}}}, True),
    ],
)
def test_no_timer_waits_for_a_gpu_unless_it_is_asked_for(ds: dict[str, Any], enabled: bool | None) -> None:
    assert value(fill(ds, accelerator=CUDA), "timers.throughput.enabled") is enabled
