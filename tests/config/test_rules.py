"""The compatibility table: each rule by configurations that break it, and a neighbour that does not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from determined_ds import Accelerator
from tests.config.deciding import Json, optimizer, read_by_deepspeed, scheduler, told, zero
from tests.package import CPU, CUDA, Rule, decide, rules


def of(ds: Json | None = None, *, pipe: int = 1, model: int = 1, sequence: int = 1, **how: Any) -> Json:
    """Arguments of ``decide``: by default of two replicas on GPUs, with a batch that divides."""
    sizes = {"pipe_parallel_size": pipe, "model_parallel_size": model, "sequence_parallel_size": sequence}
    hp = {"global_batch_size": 24, **sizes, **how.pop("hp", {})}
    return {"hp": hp, "ds": ds or {}, "slots": 2, "accelerator": CUDA, **how}


def each_of(*jsons: Json, **how: Any) -> tuple[Json, ...]:
    return tuple(of(ds, **how) for ds in jsons)


def steps(count: int) -> Json:
    return {"gradient_accumulation_steps": count}


def sums(dtype: str) -> Json:
    return {"data_types": {"grad_accum_dtype": dtype}}


FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)
TO_CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
FP16, BF16, WANDB = ({section: {"enabled": True}} for section in ("fp16", "bf16", "wandb"))
MUON = optimizer("Muon", lr=0.1, muon_lr=0.02)
TORCHS: Json = {"type": "CosineAnnealingLR", "params": {"T_max": 20}}
DUALPIPEV, ZB_H1 = {"pipe_schedule": "dualpipev"}, {"pipe_schedule": "zb-h1"}
TP: Json = {"tensor_parallel": {"autotp_size": 2}}
EP: Json = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
IN_FP32 = {**EP, **BF16, **sums("fp32")}  # which BF16_Optimizer steps, unless it is offloaded
DEEP = {**zero(1), "compile": {"deepcompile": True}}
ON_CPU = {"activation_checkpointing": {"cpu_checkpointing": True}}
COMPILED, TIMED, COUNTED = (
    {"torch_compile": True},
    {"wall_clock_breakdown": True},
    {"flops_profiler": {"enabled": True}},
)
HPZ, HP, ZERO, EXPERT = (
    "zero_hpz_partition_size",
    "hyperparameters",
    "zero_optimization",
    "expert_parallel.autoep_size",
)
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
OF_A_PIPELINE = {"pipe_schedule": "interleaved", "partition_method": "measured", "pipe_within_machine": True}

# fmt: off
# Code of a rule and the key that it names -> what breaks it, and at last the neighbour.
CASES: dict[tuple[str, str], tuple[Json, ...]] = {
    # ---- What a pipeline cannot do, and degrees that do not fit the ranks
    ("pipeline-zero-stage", f"{ZERO}.stage"): each_of(zero(2), zero(1), pipe=2),
    ("pipeline-fp16-stage", "fp16.enabled"): each_of(FP16, {**FP16, **zero(1)}, pipe=2),
    ("more-ranks-than-devices", "slots_per_trial"): (of(slots=4, accelerator=FEW), of(slots=2, accelerator=FEW)),
    ("pipeline-bubble", "gradient_accumulation_steps"): each_of(steps(1), steps(2), pipe=2),
    ("pipe-schedule", f"{HP}.pipe_schedule"): each_of(steps(3), steps(4), pipe=2, hp=DUALPIPEV),
    ("zb-h1", f"{HP}.pipe_schedule"): (
        of({**steps(2), "pipeline": {"activation_checkpoint_interval": 1}}, pipe=2, hp=ZB_H1),
        of(steps(2), pipe=2, hp={**ZB_H1, **COMPILED}), of(steps(2), pipe=2, hp=ZB_H1)),
    **{("one-stage", f"{HP}.{name}"): (of(hp={name: value}), of(steps(4), pipe=2, hp={name: value}))
       for name, value in OF_A_PIPELINE.items()},
    **{("pipe-schedule-partitioned", f"pipeline.{key}"): tuple(
        of({**steps(4), "pipeline": {key: True}}, pipe=2, hp=hp) for hp in (DUALPIPEV, {}))
       for key in ("pipe_partitioned", "grad_partitioned")},
    ("partition-measured", f"{HP}.partition_method"): (
        of(slots=4, pipe=2, model=2, hp={"partition_method": "measured"}),
        of(slots=4, pipe=2, model=2, hp={"partition_method": "parameters"})),
    # ---- What ranks that share a sequence, a layer or experts cannot do
    ("sequence-alone", f"{HP}.sequence_parallel_size"): (of(sequence=2, pipe=2, slots=4), of(sequence=2, slots=4)),
    ("sequence-degree", "sequence_parallel_size"): (
        of({"sequence_parallel_size": 2}), of({"sequence_parallel_size": 2}, sequence=2)),
    ("zeropp-groups", f"{ZERO}.{HPZ}"): (of({**zero(3, **{HPZ: 2}), **TP}, model=2, slots=4), of(zero(3, **{HPZ: 2}))),
    ("deepcompile-shared", "compile.deepcompile"): each_of({**EP, **DEEP}, DEEP),
    ("model-parallel-degree", "tensor_parallel.autotp_size"): (of(TP), of(TP, model=2)),
    ("tensor-pipeline", "tensor_parallel.autotp_size"): (of(TP, model=2, pipe=2, slots=4), of(TP, model=2, slots=4)),
    ("tensor-head", "tensor_parallel.vocab_parallel_lm_head"): each_of(
        {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}, TP, model=2),
    ("expert-degree", f"{HP}.expert_parallel_size"): (
        of(EP, hp={"expert_parallel_size": 1}), of(EP, hp={"expert_parallel_size": 2})),
    ("expert-replicas", EXPERT): (of(EP, slots=3), of(EP, slots=4)),
    ("expert-alone", EXPERT): (of(EP, pipe=2, slots=4), of(EP, slots=4)),
    ("expert-precision", f"{ZERO}.stage"): each_of({**zero(0), **BF16, **EP}, {**zero(1), **BF16, **EP}),
    ("expert-gradients", f"{ZERO}.reduce_scatter"): each_of(
        {**zero(1, reduce_scatter=False, offload_optimizer=TO_CPU), **IN_FP32},
        {**zero(1, reduce_scatter=False), **IN_FP32}),
    ("expert-gradients", f"{ZERO}.contiguous_gradients"): each_of(
        {**zero(1, contiguous_gradients=False), **EP},
        {**zero(1, contiguous_gradients=False, offload_optimizer=TO_CPU), **IN_FP32},
        {**zero(1, contiguous_gradients=False), **IN_FP32}),
    # ---- What each ZeRO stage can offload and leave out
    ("offload-param-stage", f"{ZERO}.offload_param"): each_of(*(zero(stage, offload_param=TO_CPU) for stage in (2, 3))),
    ("offload-optimizer-stage", f"{ZERO}.offload_optimizer"): each_of(
        zero(0, offload_optimizer=TO_CPU), zero(2, offload_optimizer=NVME), zero(2, offload_optimizer=TO_CPU)),
    **{("offload-nvme-path", f"{ZERO}.{what}"): each_of(zero(3, **{what: {"device": "nvme"}}), zero(3, **{what: NVME}))
       for what in ("offload_optimizer", "offload_param")},
    ("zenflow-batch", f"{ZERO}.zenflow"): each_of(
        zero(2, offload_optimizer=TO_CPU, zenflow={"topk_ratio": 0.1}), zero(2, offload_optimizer=TO_CPU)),
    # ---- What is computed and kept in 16 bits
    ("fp16-and-bf16", "fp16.enabled"): each_of({**FP16, **BF16}, {**FP16, "bf16": {"enabled": False}}),
    ("fp16-unsupported", "fp16.enabled"): (of(FP16, accelerator=CPU), of(FP16)),
    # ---- What ranks send each other, and in what
    **{("zeropp-stage", f"{ZERO}.{key}"): each_of(zero(2, **{key: on}), zero(3, **{key: on}))
       for key, on in {HPZ: 2, **dict.fromkeys(QUANTIZED, True)}.items()},
    **{("zeropp-quantized-cuda", f"{ZERO}.{key}"): (
        of(zero(3, **{key: True}), accelerator=CPU), of(zero(3, **{key: True}))) for key in QUANTIZED},
    ("zeropp-hpz-size", f"{ZERO}.{HPZ}"): each_of(  # 8 are more than there are: all of them
        zero(3, **{HPZ: 3}), zero(3, **{HPZ: 8}), slots=4),
    ("zeropp-gradients-machines", f"{ZERO}.{QUANTIZED[2]}"): each_of(
        {**BF16, **zero(3, **{QUANTIZED[2]: True})},
        {**BF16, "communication_data_type": "fp16", **zero(3, **{QUANTIZED[2]: True})}, machines=2),
    # ---- Which optimizers run where
    ("optimizer-nvcc", "optimizer.type"): each_of(optimizer(lr=0.1, torch_adam=False), optimizer(lr=0.1)),
    ("torch-schedule", "scheduler.type"): each_of(
        *({"scheduler": TORCHS, **more} for more in (zero(1), BF16, FP16)), {"scheduler": TORCHS}),
    ("zero-untested-optimizer", "optimizer.type"): each_of(
        {**zero(1), **optimizer("SGD", lr=0.1)},
        {**zero(1), **optimizer("SGD", lr=0.1), "zero_allow_untested_optimizer": True}),
    ("muon-reduce-scatter", f"{ZERO}.reduce_scatter"): each_of(
        {**MUON, **zero(3)}, {**MUON, **zero(3, reduce_scatter=False)}),
    ("muon-clipping", "gradient_clipping"): each_of({**MUON, **zero(1)}, {**MUON, **zero(0)}),
    ("muon-rates", "scheduler.params.warmup_max_lr"): each_of(
        {**MUON, **scheduler(warmup_max_lr=0.02)}, {**MUON, **scheduler(warmup_max_lr=[0.02, 0.001])}),
    ("muon-bf16-pipeline", "data_types.grad_accum_dtype"): each_of(
        {**MUON, **BF16, **zero(1), **sums("fp32")},
        {**MUON, **BF16, **zero(1, offload_optimizer=TO_CPU), **sums("fp32")}, pipe=2),
    # ---- Activation checkpointing, compilers, DeepSpeed's monitors
    ("gpus-only", "activation_checkpointing.cpu_checkpointing"): (of(ON_CPU, accelerator=CPU), of(ON_CPU)),
    ("gpus-only", "compile.deepcompile"): (of(DEEP, accelerator=CPU), of(DEEP)),
    ("pipeline-timers", "wall_clock_breakdown"): (of(TIMED, pipe=2), of(TIMED)),
    ("pipeline-timers", "flops_profiler.enabled"): (of(COUNTED, pipe=2), of(COUNTED)),
    ("logger-secret", "comet.api_key"): each_of({"comet": {"api_key": "secret"}}, {"comet": {"enabled": False}}),
    ("monitor", "wandb.enabled"): each_of(WANDB, {"tensorboard": {"enabled": True}, "csv_monitor": {"enabled": True}}),
}
# fmt: on


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.code}:{rule.key}")
def test_a_rule_is_broken_and_kept_by_the_neighbour_which_deepspeed_reads(rule: Rule) -> None:
    *broken, neighbour = CASES[rule.code, rule.key]
    for case in broken:
        problems, warnings = told(**case)
        (found,) = [each for each in (warnings if rule.warning else problems) if each.code == rule.code]
        assert (found.key, bool(problems)) == (rule.key, not rule.warning)
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert "secret" not in f"{found.value}"
    resolved = decide(**neighbour)
    assert (rule.code, rule.key) not in [(each.code, each.key) for each in resolved.warnings]
    read_by_deepspeed(resolved.ds_config, resolved.topology.data_parallel_world_size)
