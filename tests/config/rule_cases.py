"""Of each rule configurations that break it, and a neighbour that does not."""

from __future__ import annotations

from typing import Any

from determined_ds import Accelerator
from tests.package import CPU, CUDA

Json = dict[str, Any]


def of(ds: Json | None = None, *, pipe: int = 1, model: int = 1, sequence: int = 1, **how: Any) -> Json:
    """Arguments of ``decide``: by default of two replicas on GPUs, with a batch that divides."""
    sizes = {"pipe_parallel_size": pipe, "model_parallel_size": model, "sequence_parallel_size": sequence}
    hp = {"global_batch_size": 24, **sizes, **how.pop("hp", {})}
    return {"hp": hp, "ds": ds or {}, "slots": 2, "accelerator": CUDA, **how}


def zero(stage: int, **settings: Any) -> Json:
    return {"zero_optimization": {"stage": stage, **settings}}


def steps(count: int) -> Json:
    return {"gradient_accumulation_steps": count}


def sums(dtype: str) -> Json:
    return {"data_types": {"grad_accum_dtype": dtype}}


def adam(kind: str, **params: Any) -> Json:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}


def rate(peak: Any) -> Json:
    return {**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": peak}}}


FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)
TO_CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
FP16, BF16, WANDB = ({section: {"enabled": True}} for section in ("fp16", "bf16", "wandb"))
MUON = adam("Muon", muon_lr=0.02)
DUALPIPEV, ZB_H1 = {"pipe_schedule": "dualpipev"}, {"pipe_schedule": "zb-h1"}
TP: Json = {"tensor_parallel": {"autotp_size": 2}}
EP: Json = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
UNCLIPPED: Json = {"gradient_clipping": 0, **BF16, **zero(1, compute_grad_norm=False)}
DEEP = {**zero(1), "compile": {"deepcompile": True}}
ON_CPU = {"activation_checkpointing": {"cpu_checkpointing": True}}
COMPILED, TOOL = {"torch_compile": True}, {"logging": {"wandb": {}}}
HPZ, HP, ZERO = "zero_hpz_partition_size", "hyperparameters", "zero_optimization"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
OF_A_PIPELINE = {"pipe_schedule": "interleaved", "partition_method": "measured", "pipe_within_machine": True}
EXPERT = "expert_parallel.autoep_size"

# fmt: off
# Code of a rule and the key that it names -> what breaks it, and at last the neighbour.
CASES: dict[tuple[str, str], tuple[Json, ...]] = {
    # ---- What a pipeline cannot do, and degrees that do not fit the ranks
    ("pipeline-zero-stage", f"{ZERO}.stage"): (of(zero(2), pipe=2), of(zero(1), pipe=2)),
    ("pipeline-fp16-stage", "fp16.enabled"): (of(FP16, pipe=2), of({**FP16, **zero(1)}, pipe=2)),
    ("more-ranks-than-devices", "slots_per_trial"): (of(slots=4, accelerator=FEW), of(slots=2, accelerator=FEW)),
    ("pipeline-bubble", "gradient_accumulation_steps"): (of(steps(1), pipe=2), of(steps(2), pipe=2)),
    ("pipe-schedule", f"{HP}.pipe_schedule"): (of(steps(3), pipe=2, hp=DUALPIPEV), of(steps(4), pipe=2, hp=DUALPIPEV)),
    ("zb-h1", f"{HP}.pipe_schedule"): (
        of({**steps(2), "pipeline": {"activation_checkpoint_interval": 1}}, pipe=2, hp=ZB_H1),
        of(steps(2), pipe=2, hp={**ZB_H1, **COMPILED}), of(steps(2), pipe=2, hp=ZB_H1)),
    **{("one-stage", f"{HP}.{name}"): (of(hp={name: value}), of(steps(4), pipe=2, hp={name: value}))
       for name, value in OF_A_PIPELINE.items()},
    **{("pipe-schedule-partitioned", f"pipeline.{key}"): (
        of({**steps(4), "pipeline": {key: True}}, pipe=2, hp=DUALPIPEV),
        of({**steps(4), "pipeline": {key: True}}, pipe=2))
       for key in ("pipe_partitioned", "grad_partitioned")},
    ("partition-measured", f"{HP}.partition_method"): (
        of(slots=4, pipe=2, model=2, hp={"partition_method": "measured"}),
        of(slots=4, pipe=2, model=2, hp={"partition_method": "parameters"})),
    # ---- What ranks that share a sequence, a layer or experts cannot do
    ("sequence-alone", f"{HP}.sequence_parallel_size"): (of(sequence=2, pipe=2, slots=4), of(sequence=2, slots=4)),
    ("sequence-degree", "sequence_parallel_size"): (
        of({"sequence_parallel_size": 2}), of({"sequence_parallel_size": 2}, sequence=2)),
    ("sequence-length", f"{HP}.sequence_length"): (
        of(sequence=2, hp={"sequence_length": 127}), of(sequence=2, hp={"sequence_length": 128})),
    ("zeropp-groups", f"{ZERO}.{HPZ}"): (of({**zero(3, **{HPZ: 2}), **TP}, model=2, slots=4), of(zero(3, **{HPZ: 2}))),
    ("deepcompile-shared", "compile.deepcompile"): (of({**EP, **DEEP}), of(DEEP)),
    ("model-parallel-degree", "tensor_parallel.autotp_size"): (of(TP), of(TP, model=2)),
    ("tensor-pipeline", "tensor_parallel.autotp_size"): (of(TP, model=2, pipe=2, slots=4), of(TP, model=2, slots=4)),
    ("tensor-head", "tensor_parallel.vocab_parallel_lm_head"): (
        of({"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}, model=2), of(TP, model=2)),
    ("expert-degree", f"{HP}.expert_parallel_size"): (
        of(EP, hp={"expert_parallel_size": 1}), of(EP, hp={"expert_parallel_size": 2})),
    ("expert-replicas", EXPERT): (of(EP, slots=3), of(EP, slots=4)),
    ("expert-alone", EXPERT): (of(EP, pipe=2, slots=4), of(EP, slots=4)),
    ("expert-precision", f"{ZERO}.stage"): (of({**zero(0), **BF16, **EP}), of({**zero(1), **BF16, **EP})),
    ("expert-gradients", f"{ZERO}.reduce_scatter"): (
        of({**zero(1, reduce_scatter=False, offload_optimizer=TO_CPU), **EP, **BF16, **sums("fp32")}),
        of({**zero(1, reduce_scatter=False), **EP, **BF16, **sums("fp32")})),
    ("expert-gradients", f"{ZERO}.contiguous_gradients"): (
        of({**zero(1, contiguous_gradients=False), **EP}),
        of({**zero(1, contiguous_gradients=False, offload_optimizer=TO_CPU), **EP, **BF16, **sums("fp32")}),
        of({**zero(1, contiguous_gradients=False), **EP, **BF16, **sums("fp32")})),  # by BF16_Optimizer, not ZeRO's
    ("expert-compiler", "compile.autoep_non_moe"): (
        of(EP, hp=COMPILED), of({**EP, "compile": {"autoep_non_moe": True}}, hp=COMPILED)),
    # ---- What each ZeRO stage can offload and leave out
    ("offload-param-stage", f"{ZERO}.offload_param"): (
        of(zero(2, offload_param=TO_CPU)), of(zero(3, offload_param=TO_CPU))),
    ("offload-optimizer-stage", f"{ZERO}.offload_optimizer"): (
        of(zero(0, offload_optimizer=TO_CPU)), of(zero(2, offload_optimizer=NVME)),
        of(zero(2, offload_optimizer=TO_CPU))),
    **{("offload-nvme-path", f"{ZERO}.{what}"): (of(zero(3, **{what: {"device": "nvme"}})), of(zero(3, **{what: NVME})))
       for what in ("offload_optimizer", "offload_param")},
    ("compute-grad-norm-bf16", f"{ZERO}.compute_grad_norm"): (of({**UNCLIPPED, **sums("fp32")}), of(UNCLIPPED)),
    ("zenflow-batch", f"{ZERO}.zenflow"): (
        of(zero(2, offload_optimizer=TO_CPU, zenflow={"topk_ratio": 0.1})), of(zero(2, offload_optimizer=TO_CPU))),
    # ---- What is computed and kept in 16 bits
    ("fp16-and-bf16", "fp16.enabled"): (of({**FP16, **BF16}), of({**FP16, "bf16": {"enabled": False}})),
    ("fp16-unsupported", "fp16.enabled"): (of(FP16, accelerator=CPU), of(FP16)),
    ("grad-accum-mix", "data_types.grad_accum_dtype"): (
        of({**BF16, **sums("fp32")}), of({**zero(1), **BF16, **sums("fp32")})),
    # ---- What ranks send each other, and in what
    **{("zeropp-stage", f"{ZERO}.{key}"): (of(zero(2, **{key: on})), of(zero(3, **{key: on})))
       for key, on in {HPZ: 2, **dict.fromkeys(QUANTIZED, True)}.items()},
    **{("zeropp-quantized-cuda", f"{ZERO}.{key}"): (
        of(zero(3, **{key: True}), accelerator=CPU), of(zero(3, **{key: True}))) for key in QUANTIZED},
    ("zeropp-hpz-size", f"{ZERO}.{HPZ}"): (  # 8 are more than there are: all of them
        of(zero(3, **{HPZ: 3}), slots=4), of(zero(3, **{HPZ: 8}), slots=4)),
    ("zeropp-gradients-machines", f"{ZERO}.{QUANTIZED[2]}"): (
        of({**BF16, **zero(3, **{QUANTIZED[2]: True})}, machines=2),
        of({**BF16, "communication_data_type": "fp16", **zero(3, **{QUANTIZED[2]: True})}, machines=2)),
    # ---- Which optimizers run where
    ("onebit", "optimizer.type"): (of({"optimizer": {"type": "OneBitAdam"}}), of(adam("AdamW"))),
    ("optimizer-nvcc", "optimizer.type"): (of(adam("AdamW", torch_adam=False)), of(adam("AdamW"))),
    ("zero-untested-optimizer", "optimizer.type"): (
        of({**zero(1), **adam("SGD")}), of({**zero(1), **adam("SGD"), "zero_allow_untested_optimizer": True})),
    ("muon-reduce-scatter", f"{ZERO}.reduce_scatter"): (
        of({**MUON, **zero(3)}), of({**MUON, **zero(3, reduce_scatter=False)})),
    ("muon-clipping", "gradient_clipping"): (of({**MUON, **zero(1)}), of({**MUON, **zero(0)})),
    ("muon-rates", "scheduler.params.warmup_max_lr"): (of(rate(0.02)), of(rate([0.02, 0.001]))),
    ("muon-bf16-pipeline", "data_types.grad_accum_dtype"): (
        of({**MUON, **BF16, **zero(1), **sums("fp32")}, pipe=2),
        of({**MUON, **BF16, **zero(1, offload_optimizer=TO_CPU), **sums("fp32")}, pipe=2)),
    # ---- Activation checkpointing, compilers, DeepSpeed's monitors
    ("gpus-only", "activation_checkpointing.cpu_checkpointing"): (of(ON_CPU, accelerator=CPU), of(ON_CPU)),
    ("gpus-only", "compile.deepcompile"): (of(DEEP, accelerator=CPU), of(DEEP)),
    ("logger-secret", "comet.api_key"): (of({"comet": {"api_key": "secret"}}), of({"comet": {"enabled": False}})),
    ("reported-twice", "wandb.enabled"): (of(WANDB, hp=TOOL), of(hp=TOOL)),
    ("monitor", "wandb.enabled"): (of(WANDB), of({"wandb": {"enabled": False}})),
}
