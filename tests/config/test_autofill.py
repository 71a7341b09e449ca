"""What "auto" and absence stand for: a hyperparameter, the accelerator or a default; and the rate that is trained."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Accelerator, ResolvedConfig
from tests.config.deciding import AUTO, Json, optimizer, scheduler, value_at, zero
from tests.harness.ranks import Ranks
from tests.package import CPU, CUDA, OLD_CUDA, decide, refusals

LR, DECAY, BETAS, ADAM, FUSED = (
    f"optimizer.params.{name}" for name in ("lr", "weight_decay", "betas", "torch_adam", "fused")
)
PEAK, START, TOTAL = (
    f"scheduler.params.{name}" for name in ("warmup_max_lr", "warmup_min_lr", "total_num_steps")
)
CLIPPING, PINNED = "gradient_clipping", "zero_optimization.offload_optimizer.pin_memory"
DTYPE = "data_types.grad_accum_dtype"


def fill(ds: Json, hp: str = "", *, accelerator: Accelerator = CPU, pipe: int = 1) -> ResolvedConfig:
    """A decision of two replicas."""
    sizes = f"global_batch_size: 8\npipe_parallel_size: {pipe}"
    return decide(f"{hp}\n{sizes}", ds, slots=2 * pipe, accelerator=accelerator)


MANY = "learning_rate: 0.5\nweight_decay: 0.1\nbetas: [0.9, 0.9]\nwarmup_num_steps: 10"
LENGTH = "fit: {max_length: {batches: 9}}"
DECAYING = scheduler("WarmupDecayLR", warmup_max_lr=1)
# The JSON, hyperparameters -> a key, and what DeepSpeed is given there.
FILLED: list[tuple[Json, str, str, Any]] = [
    # ---- "auto" is the hyperparameter of that name, or of the one that others give it
    (optimizer(lr=AUTO), "lr: 0.01", LR, 0.01),
    (optimizer(lr=1, betas=AUTO), "adam_beta1: 0.8\nadam_beta2: 0.9", BETAS, [0.8, 0.9]),
    # ---- so is what is absent: DeepSpeed would silently take its own default
    ({}, "max_grad_norm: 0.5", CLIPPING, 0.5),
    (optimizer(), MANY, DECAY, 0.1),
    (scheduler(), MANY, "scheduler.params", {"warmup_max_lr": 0.5, "warmup_num_steps": 10}),
    (DECAYING, LENGTH, TOTAL, 9),
    # ---- but only what the optimizer or the schedule takes
    ({}, MANY, "optimizer", None),
    (optimizer("SGD"), MANY, "optimizer.params", {"lr": 0.5}),
    # ---- a warm-up starts with its first step: its share of the peak that is really used
    (scheduler(warmup_min_lr=AUTO, warmup_max_lr=1.0, warmup_num_steps=4), MANY, START, 0.25),
    # ---- all else is left to DeepSpeed, whose AdamW takes another weight decay than torch's
    (optimizer(lr=1, betas=AUTO, eps=AUTO), "", "optimizer.params", {"lr": 1, "torch_adam": True}),
    (optimizer(lr=1, weight_decay=AUTO), "", DECAY, 0.0),
]


@pytest.mark.parametrize(("ds", "hp", "key", "given"), FILLED)
def test_a_hyperparameter_fills_auto_and_what_is_absent(ds: Json, hp: str, key: str, given: Any) -> None:
    assert value_at(fill(ds, hp).ds_config, key) == given


@pytest.mark.parametrize(
    ("ds", "hp", "key", "fix"),
    [
        (optimizer(lr=AUTO), "learning_rate: auto", LR, "hyperparameter learning_rate"),
        # DeepSpeed would go up to 0.001, whatever the rate of the trial's own optimizer is.
        (scheduler("WarmupDecayLR", total_num_steps=9), "", PEAK, "hyperparameter learning_rate"),
        (DECAYING, "fit: {max_length: {epochs: 1}}", TOTAL, "fit.max_length in batches"),
    ],
)
def test_an_auto_that_nothing_determines_is_refused(ds: Json, hp: str, key: str, fix: str) -> None:
    (problem,) = refusals(lambda: fill(ds, hp))
    assert (problem.key, problem.code) == (key, "auto-undetermined")
    assert fix in problem.fix


def enabled(**sections: Any) -> Json:
    return {section: {"enabled": on} for section, on in sections.items()}


CPU_OFFLOAD = zero(1, offload_optimizer={"device": "cpu", "pin_memory": AUTO})
NVME = {"device": "nvme", "nvme_path": "/nvme"}
BF16 = {**enabled(bf16=AUTO), **zero(1)}
# The JSON, where it runs, stages of a pipeline -> what DeepSpeed is given at some keys.
ON: list[tuple[Json, Accelerator, int, Json]] = [
    # ---- precision; a bf16 pipeline accumulates in fp32
    (enabled(bf16=AUTO), OLD_CUDA, 1, {"bf16.enabled": False, "fp16.enabled": None}),
    (enabled(bf16=AUTO, fp16=AUTO), CUDA, 1, {"bf16.enabled": True, "fp16.enabled": False}),
    (enabled(bf16=AUTO, fp16=AUTO), OLD_CUDA, 1, {"bf16.enabled": False, "fp16.enabled": True}),
    (enabled(bf16=AUTO, fp16=True), CUDA, 1, {"bf16.enabled": False, "fp16.enabled": True}),
    (BF16, CUDA, 2, {DTYPE: "fp32"}),
    (BF16, CUDA, 1, {DTYPE: None}),
    # ---- memory is pinned for CUDA only
    (CPU_OFFLOAD, CPU, 1, {PINNED: False}),
    (CPU_OFFLOAD, CUDA, 1, {PINNED: True}),
    # ---- Adam is torch's, so that nothing has to be compiled before the first step; on GPUs the fused one
    (optimizer("Adam", lr=1), CPU, 1, {ADAM: True, FUSED: None}),
    (optimizer("Adam", lr=1), CUDA, 1, {ADAM: True, FUSED: True}),
    ({**optimizer(lr=1), **zero(3, offload_optimizer=NVME)}, CUDA, 1, {ADAM: None, FUSED: None}),
    (optimizer(lr=1, foreach=True), CUDA, 1, {ADAM: True, FUSED: None}),  # torch takes one of the two
    (optimizer(lr=1, bias_correction=False), CUDA, 1, {ADAM: None, FUSED: None}),  # torch's has none
    # ---- no timer waits for a GPU
    ({"timers": {}, "wall_clock_breakdown": True}, CUDA, 1, {"timers.throughput.enabled": False}),
]


@pytest.mark.parametrize(("ds", "accelerator", "pipe", "given"), ON)
def test_the_accelerator_fills_what_depends_on_it(
    ds: Json, accelerator: Accelerator, pipe: int, given: Json
) -> None:
    found = fill(ds, accelerator=accelerator, pipe=pipe).ds_config
    assert {key: value_at(found, key) for key in given} == given


GIVEN, STATED, OTHER = 0.25, 0.5, 0.75  # of the hyperparameter, of the JSON, of the other place in the JSON
WARM_UP = 3
HP = f"global_batch_size: 2\nlearning_rate: {GIVEN}\nfit: {{max_length: {{batches: 100}}}}\n"


def config(kind: str | None, lr: Any = None, **params: Any) -> Json:
    ds = optimizer("SGD", **({} if lr is None else {"lr": lr}))
    if kind and kind.startswith("Warmup"):
        params = {"warmup_num_steps": WARM_UP, "warmup_type": "linear", **params}
    return {**ds, **scheduler(kind, **params)} if kind else ds


def highest_rates(configs: list[Json]) -> list[float]:
    """In a rank: the highest rate at which an engine of each takes the first steps."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = []
    for ds_config in configs:
        model = torch.nn.Linear(2, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        rates = []
        for _ in range(WARM_UP + 3):
            engine.backward(engine(torch.ones(2, 2)).sum())
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.step()
        found.append(float(max(rates)))
    return found


HYPERPARAMETER, OWN = ("hyperparameters.learning_rate", GIVEN), ("optimizer.params.lr", OTHER)
RANGE_TEST = {"lr_range_test_step_rate": 0}
OF_ITS_OWN = {**RANGE_TEST, "lr_range_test_min_lr": STATED}
# What the JSON states, the rate that is trained with, and what is stated and not trained with.
CASES: list[tuple[Json, float, list[tuple[str, Any]]]] = [
    (config(None, STATED), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", STATED, warmup_max_lr=AUTO), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", AUTO, warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", OTHER, warmup_max_lr=STATED), STATED, [HYPERPARAMETER, OWN]),
    (config("WarmupLR", AUTO, warmup_max_lr=AUTO), GIVEN, []),
    (config("LRRangeTest", **RANGE_TEST), GIVEN, []),
    (config("LRRangeTest", OTHER, **OF_ITS_OWN), STATED, [HYPERPARAMETER, OWN]),
]


def test_an_engine_trains_with_the_stated_rate(one_rank: Ranks) -> None:
    decided = [decide(HP, ds, slots=1) for ds, *_ in CASES]
    [rates] = one_rank.run(highest_rates, [each.ds_config for each in decided])
    for (ds, rate, unused), resolved, found in zip(CASES, decided, rates, strict=True):
        assert found == pytest.approx(rate, rel=0.02), ds
        assert [(warning.key, warning.value) for warning in resolved.warnings] == unused, ds
