"""Of each rule configurations that break it, and a neighbour that does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from determined_ds import Accelerator
from tests.package import CPU, CUDA

Json = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A configuration; the rest is two replicas and a batch that divides."""

    ds: Json = field(default_factory=dict)
    pipe: int = 1
    model: int = 1
    sequence: int = 1
    slots: int = 2
    accelerator: Accelerator = CUDA
    machines: int = 1
    hp: Json = field(default_factory=dict)


def zero(stage: int, **settings: Any) -> Json:
    return {"zero_optimization": {"stage": stage, **settings}}


def cut(**settings: Any) -> Json:
    return {"tensor_parallel": {"autotp_size": 2, **settings}}


def steps(count: int) -> Json:
    return {"gradient_accumulation_steps": count}


def rate(peak: Any) -> Json:
    return {**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": peak}}}


FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)
CPU_OFFLOAD, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
FP16, BF16, WANDB = ({section: {"enabled": True}} for section in ("fp16", "bf16", "wandb"))
FP32_SUMS, BF16_SUMS = ({"data_types": {"grad_accum_dtype": dtype}} for dtype in ("fp32", "bf16"))
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
ADAMW: Json = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
MUON: Json = {"optimizer": {"type": "Muon", "params": {"lr": 0.001, "muon_lr": 0.02}}}
DUALPIPEV, INTERLEAVED, ZB_H1 = ({"pipe_schedule": name} for name in ("dualpipev", "interleaved", "zb-h1"))
BY_TIME = {"partition_method": "measured"}
EP: Json = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
UNCLIPPED: Json = {"gradient_clipping": 0, **BF16}
DEEP = {**zero(1), "compile": {"deepcompile": True}}
ON_CPU = {"activation_checkpointing": {"cpu_checkpointing": True}}
COMPILED = {"torch_compile": True}
TOOL: Json = {"logging": {"wandb": {}}}
HPZ, HP = "zero_hpz_partition_size", "hyperparameters"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
OF_A_PIPELINE = {**INTERLEAVED, **BY_TIME, "pipe_within_machine": True}

# fmt: off
# Code of a rule -> each key that it names -> (what breaks it, ..., their neighbour).
CASES: dict[str, dict[str, tuple[Setup, ...]]] = {
    # ---- What a pipeline cannot do, and degrees that do not fit the ranks
    "pipeline-zero-stage": {"zero_optimization.stage": (Setup(zero(2), pipe=2), Setup(zero(1), pipe=2))},
    "pipeline-fp16-stage": {"fp16.enabled": (Setup(FP16, pipe=2), Setup({**FP16, **zero(1)}, pipe=2))},
    "more-ranks-than-devices": {
        "slots_per_trial": (Setup(slots=4, accelerator=FEW), Setup(slots=2, accelerator=FEW))},
    "pipeline-bubble": {"gradient_accumulation_steps": (Setup(steps(1), pipe=2), Setup(steps(2), pipe=2))},
    "pipe-schedule": {f"{HP}.pipe_schedule":
        (Setup(steps(3), pipe=2, hp=DUALPIPEV), Setup(steps(4), pipe=2, hp=DUALPIPEV))},
    "zb-h1": {f"{HP}.pipe_schedule":
        (Setup({**steps(2), "pipeline": {"activation_checkpoint_interval": 1}}, pipe=2, hp=ZB_H1),
         Setup(steps(2), pipe=2, hp=ZB_H1))},
    "one-stage": {f"{HP}.{name}": (Setup(hp={name: value}), Setup(steps(4), pipe=2, hp={name: value}))
        for name, value in OF_A_PIPELINE.items()},
    # ---- What ranks that share a sequence, a layer or experts cannot do
    "sequence-alone": {
        f"{HP}.sequence_parallel_size": (Setup(sequence=2, pipe=2, slots=4), Setup(sequence=2, slots=4))},
    "sequence-degree": {"sequence_parallel_size":
        (Setup({"sequence_parallel_size": 2}), Setup({"sequence_parallel_size": 2}, sequence=2))},
    "zeropp-groups": {f"zero_optimization.{HPZ}":
        (Setup({**zero(3, **{HPZ: 2}), **cut()}, model=2, slots=4), Setup(zero(3, **{HPZ: 2})))},
    "deepcompile-shared": {"compile.deepcompile": (Setup({**EP, **DEEP}), Setup(DEEP))},
    "model-parallel-degree": {"tensor_parallel.autotp_size": (Setup(cut()), Setup(cut(), model=2))},
    "tensor-pipeline": {
        "tensor_parallel.autotp_size": (Setup(cut(), model=2, pipe=2, slots=4), Setup(cut(), model=2, slots=4))},
    "expert-degree": {f"{HP}.expert_parallel_size":
        (Setup(EP, hp={"expert_parallel_size": 1}), Setup(EP, hp={"expert_parallel_size": 2}))},
    "expert-replicas": {"expert_parallel.autoep_size": (Setup(EP, slots=3), Setup(EP, slots=4))},
    "expert-alone": {"expert_parallel.autoep_size": (Setup(EP, pipe=2, slots=4), Setup(EP, slots=4))},
    "expert-precision": {
        "zero_optimization.stage": (Setup({**zero(0), **BF16, **EP}), Setup({**zero(1), **BF16, **EP}))},
    "expert-contiguous": {"zero_optimization.contiguous_gradients":
        (Setup({**zero(1, contiguous_gradients=False), **EP}), Setup({**zero(3, contiguous_gradients=False), **EP}))},
    "expert-compiler": {"compile.autoep_non_moe":
        (Setup(EP, hp=COMPILED), Setup({**EP, "compile": {"autoep_non_moe": True}}, hp=COMPILED))},
    # ---- What each ZeRO stage can offload and leave out
    "offload-param-stage": {"zero_optimization.offload_param":
        (Setup(zero(2, offload_param=CPU_OFFLOAD)), Setup(zero(3, offload_param=CPU_OFFLOAD)))},
    "offload-optimizer-stage": {"zero_optimization.offload_optimizer":
        (Setup(zero(0, offload_optimizer=CPU_OFFLOAD)), Setup(zero(2, offload_optimizer=NVME)),
         Setup(zero(2, offload_optimizer=CPU_OFFLOAD)))},
    "offload-nvme-path": {f"zero_optimization.{what}":
        (Setup(zero(3, **{what: {"device": "nvme"}})), Setup(zero(3, **{what: NVME})))
        for what in ("offload_optimizer", "offload_param")},
    "compute-grad-norm-bf16": {"zero_optimization.compute_grad_norm":
        (Setup({**UNCLIPPED, **FP32_SUMS, **zero(1, compute_grad_norm=False)}),
         Setup({**UNCLIPPED, **zero(1, compute_grad_norm=False)}))},
    "zenflow-batch": {"zero_optimization.zenflow":
        (Setup(zero(2, offload_optimizer=CPU_OFFLOAD, zenflow={"topk_ratio": 0.1})),
         Setup(zero(2, offload_optimizer=CPU_OFFLOAD)))},
    # ---- What is computed and kept in 16 bits
    "fp16-and-bf16": {"fp16.enabled": (Setup({**FP16, **BF16}), Setup({**FP16, "bf16": {"enabled": False}}))},
    "fp16-unsupported": {"fp16.enabled": (Setup(FP16, accelerator=CPU), Setup(FP16))},
    "grad-accum-mix": {
        "data_types.grad_accum_dtype": (Setup({**BF16, **FP32_SUMS}), Setup({**zero(1), **BF16, **FP32_SUMS}))},
    # ---- What ranks send each other, and in what
    "zeropp-stage": {f"zero_optimization.{key}": (Setup(zero(2, **{key: on})), Setup(zero(3, **{key: on})))
        for key, on in {HPZ: 2, **dict.fromkeys(QUANTIZED, True)}.items()},
    "zeropp-quantized-cuda": {f"zero_optimization.{key}":
        (Setup(zero(3, **{key: True}), accelerator=CPU), Setup(zero(3, **{key: True}))) for key in QUANTIZED},
    "zeropp-hpz-size": {f"zero_optimization.{HPZ}":  # 8 are more than there are: all of them
        (Setup(zero(3, **{HPZ: 3}), slots=4), Setup(zero(3, **{HPZ: 8}), slots=4))},
    "zeropp-gradients-machines": {"zero_optimization.zero_quantized_gradients":
        (Setup({**BF16, **zero(3, zero_quantized_gradients=True)}, machines=2),
         Setup({**BF16, "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)}, machines=2))},
    # ---- Which optimizers run where
    "onebit": {"optimizer.type": (Setup({"optimizer": {"type": "OneBitAdam"}}), Setup(ADAMW))},
    "optimizer-nvcc": {"optimizer.type":
        (Setup({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}), Setup(ADAMW))},
    "zero-untested-optimizer": {"optimizer.type":
        (Setup({**zero(1), **SGD}), Setup({**zero(1), **SGD, "zero_allow_untested_optimizer": True}))},
    "muon-reduce-scatter": {"zero_optimization.reduce_scatter":
        (Setup({**MUON, **zero(3)}), Setup({**MUON, **zero(3, reduce_scatter=False)}))},
    "muon-clipping": {"gradient_clipping": (Setup({**MUON, **zero(1)}), Setup({**MUON, **zero(0)}))},
    "muon-rates": {"scheduler.params.warmup_max_lr": (Setup(rate(0.02)), Setup(rate([0.02, 0.001])))},
    "muon-bf16-pipeline": {"data_types.grad_accum_dtype":
        (Setup({**MUON, **BF16, **zero(1), **FP32_SUMS}, pipe=2),
         Setup({**MUON, **BF16, **zero(1), **BF16_SUMS}, pipe=2))},
    # ---- Activation checkpointing, compilers, DeepSpeed's monitors
    "gpus-only": {
        "activation_checkpointing.cpu_checkpointing": (Setup(ON_CPU, accelerator=CPU), Setup(ON_CPU)),
        "compile.deepcompile": (Setup(DEEP, accelerator=CPU), Setup(DEEP))},
    "logger-secret": {"comet.api_key": (Setup({"comet": {"api_key": "secret"}}), Setup({"comet": {"enabled": False}}))},
    "reported-twice": {"wandb.enabled": (Setup(WANDB, hp=TOOL), Setup(hp=TOOL))},
    "monitor": {"wandb.enabled": (Setup(WANDB), Setup({"wandb": {"enabled": False}}))},
}
