"""Of each rule a configuration that breaks it, and a neighbour that does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from determined_ds import Accelerator
from tests.package import CPU, CUDA

ZERO = "zero_optimization"
FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration; the rest is two replicas and a batch that divides."""

    ds: dict[str, Any] = field(default_factory=dict)
    pipe: int = 1
    model: int = 1
    sequence: int = 1
    slots: int = 2
    accelerator: Accelerator = CUDA
    machines: int = 1
    hyperparameters: dict[str, Any] = field(default_factory=dict)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **settings}}


CPU_OFFLOAD, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.001, "muon_lr": 0.02}}}
DUALPIPEV, INTERLEAVED, ZB_H1 = ({"pipe_schedule": name} for name in ("dualpipev", "interleaved", "zb-h1"))
BY_TIME = {"partition_method": "measured"}


QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def cut(**settings: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, **settings}}


ON: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
AROUND = {"autoep_non_moe": True}
WANDB = {"wandb": {"enabled": True}}
NO_CLIPPING = {"gradient_clipping": 0}

# Code and key of a rule -> (what breaks it, its neighbour).
CASES: dict[str, tuple[Setup, Setup]] = {
    # ---- What a pipeline cannot do, and degrees that do not fit the ranks
    "pipeline-zero-stage:zero_optimization.stage": (Setup(ds=zero(2), pipe=2), Setup(ds=zero(1), pipe=2)),
    "pipeline-fp16-stage:fp16.enabled": (Setup(ds=FP16, pipe=2), Setup(ds={**FP16, **zero(1)}, pipe=2)),
    "more-ranks-than-devices:slots_per_trial": (
        Setup(slots=4, accelerator=FEW),
        Setup(slots=2, accelerator=FEW),
    ),
    "pipeline-bubble:gradient_accumulation_steps": (
        Setup(ds={"gradient_accumulation_steps": 1}, pipe=2),
        Setup(ds={"gradient_accumulation_steps": 2}, pipe=2),
    ),
    "pipe-schedule:hyperparameters.pipe_schedule": (
        Setup(ds={"gradient_accumulation_steps": 3}, pipe=2, hyperparameters=DUALPIPEV),
        Setup(ds={"gradient_accumulation_steps": 4}, pipe=2, hyperparameters=DUALPIPEV),
    ),
    **{
        f"pipe-schedule-partitioned:pipeline.{key}": (
            Setup(
                ds={"gradient_accumulation_steps": 4, "pipeline": {key: True}},
                pipe=2,
                hyperparameters=INTERLEAVED,
            ),
            Setup(ds={"gradient_accumulation_steps": 4, "pipeline": {key: True}}, pipe=2),
        )
        for key in ("pipe_partitioned", "grad_partitioned")
    },
    "partition-measured:hyperparameters.partition_method": (
        Setup(slots=4, pipe=2, model=2, hyperparameters=BY_TIME),
        Setup(slots=4, pipe=2, model=2, hyperparameters={"partition_method": "parameters"}),
    ),
    "zb-h1:hyperparameters.pipe_schedule": (
        Setup(
            ds={"gradient_accumulation_steps": 2, "pipeline": {"activation_checkpoint_interval": 1}},
            pipe=2,
            hyperparameters=ZB_H1,
        ),
        Setup(ds={"gradient_accumulation_steps": 2}, pipe=2, hyperparameters=ZB_H1),
    ),
    **{
        f"one-stage:hyperparameters.{name}": (
            Setup(hyperparameters={name: value}),
            Setup(ds={"gradient_accumulation_steps": 4}, pipe=2, hyperparameters={name: value}),
        )
        for name, value in (
            ("pipe_schedule", "interleaved"),
            ("partition_method", "measured"),
            ("pipe_within_machine", True),
        )
    },
    # ---- What ranks that share a sequence cannot do
    "sequence-alone:hyperparameters.sequence_parallel_size": (
        Setup(sequence=2, pipe=2, slots=4),
        Setup(sequence=2, slots=4),
    ),
    "sequence-degree:sequence_parallel_size": (
        Setup(ds={"sequence_parallel_size": 2}),
        Setup(ds={"sequence_parallel_size": 2}, sequence=2),
    ),
    "sequence-length:hyperparameters.sequence_length": (
        Setup(sequence=2, hyperparameters={"sequence_length": 127}),
        Setup(sequence=2, hyperparameters={"sequence_length": 128}),
    ),
    "zeropp-groups:zero_optimization.zero_hpz_partition_size": (
        Setup(ds={**zero(3, zero_hpz_partition_size=2), **cut()}, model=2, slots=4),
        Setup(ds=zero(3, zero_hpz_partition_size=2)),
    ),
    "deepcompile-shared:compile.deepcompile": (
        Setup(ds={**zero(1), **ON, "compile": {"deepcompile": True}}),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    # ---- What ranks that share a layer cannot do
    "model-parallel-degree:tensor_parallel.autotp_size": (Setup(ds=cut(), model=1), Setup(ds=cut(), model=2)),
    "tensor-pipeline:tensor_parallel.autotp_size": (
        Setup(ds=cut(), model=2, pipe=2, slots=4),
        Setup(ds=cut(), model=2, slots=4),
    ),
    "tensor-head:tensor_parallel.vocab_parallel_lm_head": (
        Setup(ds=cut(vocab_parallel_lm_head=True), model=2),
        Setup(ds=cut(), model=2),
    ),
    # ---- What ranks that share experts cannot do
    "expert-degree:hyperparameters.expert_parallel_size": (
        Setup(ds=ON, hyperparameters={"expert_parallel_size": 1}),
        Setup(ds=ON, hyperparameters={"expert_parallel_size": 2}),
    ),
    "expert-alone:expert_parallel.autoep_size": (Setup(ds=ON, pipe=2, slots=4), Setup(ds=ON, slots=4)),
    "expert-precision:zero_optimization.stage": (
        Setup(ds={**zero(0), **BF16, **ON}),
        Setup(ds={**zero(1), **BF16, **ON}),
    ),
    "expert-contiguous:zero_optimization.contiguous_gradients": (
        Setup(ds={**zero(1, contiguous_gradients=False), **ON}),
        Setup(ds={**zero(3, contiguous_gradients=False), **ON}),
    ),
    "expert-compiler:compile.autoep_non_moe": (
        Setup(ds=ON, hyperparameters={"torch_compile": True}),
        Setup(ds={**ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
    ),
    # ---- What each ZeRO stage can offload and leave out
    "offload-param-stage:zero_optimization.offload_param": (
        Setup(ds=zero(2, offload_param=CPU_OFFLOAD)),
        Setup(ds=zero(3, offload_param=CPU_OFFLOAD)),
    ),
    "offload-optimizer-stage:zero_optimization.offload_optimizer": (
        Setup(ds=zero(0, offload_optimizer=CPU_OFFLOAD)),
        Setup(ds=zero(1, offload_optimizer=CPU_OFFLOAD)),
    ),
    "offload-nvme-stage:zero_optimization.offload_optimizer.device": (
        Setup(ds=zero(2, offload_optimizer=NVME)),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    "offload-nvme-path:zero_optimization.offload_optimizer.device": (
        Setup(ds=zero(3, offload_optimizer={"device": "nvme"})),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    "offload-nvme-path:zero_optimization.offload_param.device": (
        Setup(ds=zero(3, offload_param={"device": "nvme"})),
        Setup(ds=zero(3, offload_param=NVME)),
    ),
    "compute-grad-norm-bf16:zero_optimization.compute_grad_norm": (
        Setup(ds={**NO_CLIPPING, **BF16, **FP32_SUMS, **zero(1, compute_grad_norm=False)}),
        Setup(ds={**NO_CLIPPING, **BF16, **zero(1, compute_grad_norm=False)}),
    ),
    "zenflow-batch:zero_optimization.zenflow": (
        Setup(ds=zero(2, offload_optimizer=CPU_OFFLOAD, zenflow={"topk_ratio": 0.1})),
        Setup(ds=zero(2, offload_optimizer=CPU_OFFLOAD)),
    ),
    # ---- What is computed and kept in 16 bits
    "fp16-and-bf16:fp16.enabled": (
        Setup(ds={**FP16, "bf16": {"enabled": True}}),
        Setup(ds={**FP16, "bf16": {"enabled": False}}),
    ),
    "fp16-unsupported:fp16.enabled": (Setup(ds=FP16, accelerator=CPU), Setup(ds=FP16)),
    "grad-accum-mix:data_types.grad_accum_dtype": (
        Setup(ds={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ),
    # ---- What ranks send each other, and in what
    **{
        f"zeropp-stage:{ZERO}.{key}": (Setup(ds=zero(2, **{key: on})), Setup(ds=zero(3, **{key: on})))
        for key, on in (("zero_hpz_partition_size", 2), *((key, True) for key in QUANTIZED))
    },
    **{
        f"zeropp-quantized-cuda:{ZERO}.{key}": (
            Setup(ds=zero(3, **{key: True}), accelerator=CPU),
            Setup(ds=zero(3, **{key: True})),
        )
        for key in QUANTIZED
    },
    "zeropp-hpz-size:zero_optimization.zero_hpz_partition_size": (
        Setup(ds=zero(3, zero_hpz_partition_size=3), slots=4),
        Setup(ds=zero(3, zero_hpz_partition_size=8), slots=4),  # more than there are: all of them
    ),
    "zeropp-gradients-machines:zero_optimization.zero_quantized_gradients": (
        Setup(ds={**BF16, **zero(3, zero_quantized_gradients=True)}, machines=2),
        Setup(
            ds={**BF16, "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)},
            machines=2,
        ),
    ),
    # ---- Which optimizers run where
    "onebit:optimizer.type": (
        Setup(ds={"optimizer": {"type": "OneBitAdam"}}),
        Setup(ds={"optimizer": {"type": "AdamW"}}),
    ),
    "optimizer-nvcc:optimizer.type": (
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}),
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}),
    ),
    "zero-untested-optimizer:optimizer.type": (
        Setup(ds={**zero(1), **SGD}),
        Setup(ds={**zero(1), **SGD, "zero_allow_untested_optimizer": True}),
    ),
    "muon-reduce-scatter:zero_optimization.reduce_scatter": (
        Setup(ds={**MUON, **zero(3)}),
        Setup(ds={**MUON, **zero(3, reduce_scatter=False)}),
    ),
    "muon-clipping:gradient_clipping": (
        Setup(ds={**MUON, **zero(1), "gradient_clipping": 1.0}),
        Setup(ds={**MUON, **zero(0), "gradient_clipping": 1.0}),
    ),
    "muon-rates:scheduler.params.warmup_max_lr": (
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}}),
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}),
    ),
    "muon-rates-pipeline:scheduler.params.warmup_max_lr": (
        Setup(
            ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}, pipe=2
        ),
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}),
    ),
    "muon-bf16-pipeline:data_types.grad_accum_dtype": (
        Setup(ds={**MUON, **BF16, **zero(1), "data_types": {"grad_accum_dtype": "fp32"}}, pipe=2),
        Setup(ds={**MUON, **BF16, **zero(1), "data_types": {"grad_accum_dtype": "bf16"}}, pipe=2),
    ),
    # ---- Activation checkpointing, compilers, DeepSpeed's instruments
    "cpu-checkpointing:activation_checkpointing.cpu_checkpointing": (
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CPU),
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CUDA),
    ),
    "deepcompile-cuda:compile.deepcompile": (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, accelerator=CPU),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    # ---- DeepSpeed's own monitors
    "logger-secret:comet.api_key": (
        Setup(ds={"comet": {"api_key": "secret"}}),
        Setup(ds={"comet": {"enabled": False}}),
    ),
    "reported-twice:wandb.enabled": (
        Setup(ds=WANDB, hyperparameters={"logging": {"wandb": {}}}),
        Setup(hyperparameters={"logging": {"wandb": {}}}),
    ),
    "monitor:wandb.enabled": (Setup(ds=WANDB), Setup(ds={"wandb": {"enabled": False}})),
}
