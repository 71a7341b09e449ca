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
MASTER = {"enabled": True, "bf16_master_weights_and_grads": True}
CONTIGUOUS = {"contiguous_memory_optimization": True}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.001, "muon_lr": 0.02}}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
DUALPIPEV, INTERLEAVED, ZB_H1 = ({"pipe_schedule": name} for name in ("dualpipev", "interleaved", "zb-h1"))
BY_TIME = {"partition_method": "measured"}


def cut(**settings: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, **settings}}


ON: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
AROUND = {"autoep_non_moe": True}
NO_CLIPPING = {"gradient_clipping": 0}
SUPER = {"device": "cpu", "super_offload": True}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}}

# Code and key of a rule -> (what breaks it, its neighbour).
CASES: dict[str, tuple[Setup, Setup]] = {
    # ---- What a pipeline cannot do, and degrees that do not fit the ranks
    "pipe-within-machine:hyperparameters.pipe_within_machine": (
        Setup(hyperparameters={"pipe_within_machine": True}),
        Setup(hyperparameters={"pipe_within_machine": True, "pipe_schedule": "1f1b"}, pipe=2),
    ),
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
    "pipeline-bf16-grad-dtype:data_types.grad_accum_dtype": (
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, pipe=2),
        Setup(
            ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "torch.float32"}},
            pipe=2,
        ),
    ),
    "pipeline-unheeded:flops_profiler.enabled": (
        Setup(ds={"flops_profiler": {"enabled": True}}, pipe=2),
        Setup(ds={"flops_profiler": {"enabled": True}}),
    ),
    "pipeline-unheeded:hybrid_engine.enabled": (
        Setup(ds={"hybrid_engine": {"enabled": True}}, pipe=2),
        Setup(ds={"hybrid_engine": {"enabled": True}}),
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
    "partition-one-stage:hyperparameters.partition_method": (
        Setup(hyperparameters=BY_TIME),
        Setup(pipe=2, hyperparameters=BY_TIME),
    ),
    "partition-measured:hyperparameters.partition_method": (
        Setup(slots=4, pipe=2, model=2, hyperparameters=BY_TIME),
        Setup(slots=4, pipe=2, model=2, hyperparameters={"partition_method": "parameters"}),
    ),
    "zb-h1-recomputation:hyperparameters.pipe_schedule": (
        Setup(
            ds={"gradient_accumulation_steps": 2, "pipeline": {"activation_checkpoint_interval": 1}},
            pipe=2,
            hyperparameters=ZB_H1,
        ),
        Setup(
            ds={"gradient_accumulation_steps": 4, "pipeline": {"activation_checkpoint_interval": 1}},
            pipe=2,
            hyperparameters=INTERLEAVED,
        ),
    ),
    "zb-h1-compiled:hyperparameters.pipe_schedule": (
        Setup(
            ds={"gradient_accumulation_steps": 2}, pipe=2, hyperparameters={**ZB_H1, "torch_compile": True}
        ),
        Setup(ds={"gradient_accumulation_steps": 2}, pipe=2, hyperparameters=ZB_H1),
    ),
    "pipe-schedule-one-stage:hyperparameters.pipe_schedule": (
        Setup(hyperparameters=INTERLEAVED),
        Setup(ds={"gradient_accumulation_steps": 4}, pipe=2, hyperparameters=INTERLEAVED),
    ),
    # ---- What ranks that share a sequence cannot do
    "sequence-pipeline:hyperparameters.sequence_parallel_size": (
        Setup(sequence=2, pipe=2, slots=4),
        Setup(sequence=2, slots=4),
    ),
    "sequence-model:hyperparameters.sequence_parallel_size": (
        Setup(sequence=2, model=2, slots=4),
        Setup(model=2, slots=4),
    ),
    "sequence-degree:sequence_parallel_size": (
        Setup(ds={"sequence_parallel_size": 2}),
        Setup(ds={"sequence_parallel_size": 2}, sequence=2),
    ),
    "sequence-mesh:data_parallel_size": (
        Setup(ds={"data_parallel_size": 1}, sequence=2),
        Setup(ds={"data_parallel_size": 2}),
    ),
    "sequence-length:hyperparameters.sequence_length": (
        Setup(sequence=2, hyperparameters={"sequence_length": 127}),
        Setup(sequence=2, hyperparameters={"sequence_length": 128}),
    ),
    "sequence-hpz:zero_optimization.zero_hpz_partition_size": (
        Setup(ds=zero(3, zero_hpz_partition_size=2), sequence=2),
        Setup(ds=zero(3, zero_hpz_partition_size=2)),
    ),
    "sequence-deepcompile:compile.deepcompile": (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, sequence=2),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    # ---- What ranks that share a layer cannot do
    "model-parallel-degree:tensor_parallel.autotp_size": (Setup(ds=cut(), model=1), Setup(ds=cut(), model=2)),
    "tensor-pipeline:tensor_parallel.autotp_size": (
        Setup(ds=cut(), model=2, pipe=2, slots=4),
        Setup(ds=cut(), model=2, slots=4),
    ),
    "tensor-zeropp:zero_optimization.zero_hpz_partition_size": (
        Setup(ds={**zero(3, zero_hpz_partition_size=2), **cut()}, model=2, slots=4),
        Setup(ds={**zero(3), **cut()}, model=2, slots=4),
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
    "expert-replicas:expert_parallel.autoep_size": (Setup(ds=ON, slots=3), Setup(ds=ON, slots=4)),
    "expert-pipeline:expert_parallel.autoep_size": (Setup(ds=ON, pipe=2, slots=4), Setup(ds=ON, slots=4)),
    "expert-model:expert_parallel.autoep_size": (Setup(ds=ON, model=2, slots=4), Setup(ds=ON, slots=4)),
    "expert-sequence:expert_parallel.autoep_size": (Setup(ds=ON, sequence=2, slots=4), Setup(ds=ON, slots=4)),
    "expert-precision:zero_optimization.stage": (
        Setup(ds={**zero(0), **BF16, **ON}),
        Setup(ds={**zero(1), **BF16, **ON}),
    ),
    "expert-zeropp:zero_optimization.zero_hpz_partition_size": (
        Setup(ds={**zero(3, zero_hpz_partition_size=2), **ON}),
        Setup(ds={**zero(3), **ON}),
    ),
    "expert-reduce-scatter:zero_optimization.reduce_scatter": (
        Setup(ds={**zero(1, reduce_scatter=False), **ON}),
        Setup(ds={**zero(3, reduce_scatter=False), **ON}),
    ),
    "expert-contiguous:zero_optimization.contiguous_gradients": (
        Setup(ds={**zero(1, contiguous_gradients=False), **ON}),
        Setup(ds={**zero(3, contiguous_gradients=False), **ON}),
    ),
    "expert-compiler:compile.autoep_non_moe": (
        Setup(ds=ON, hyperparameters={"torch_compile": True}),
        Setup(ds={**ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
    ),
    "expert-compiler-zero:compile.autoep_non_moe": (
        Setup(ds={**zero(3), **ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
        Setup(ds={**zero(2), **ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
    ),
    "expert-deepcompile:compile.deepcompile": (
        Setup(ds={**zero(1), **ON, "compile": {"deepcompile": True}}),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
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
    "compute-grad-norm-stage:zero_optimization.compute_grad_norm": (
        Setup(ds={**NO_CLIPPING, **zero(3, compute_grad_norm=False)}),
        Setup(ds={**NO_CLIPPING, **zero(2, compute_grad_norm=False)}),
    ),
    "compute-grad-norm-bf16:zero_optimization.compute_grad_norm": (
        Setup(ds={**NO_CLIPPING, **BF16, **FP32_SUMS, **zero(1, compute_grad_norm=False)}),
        Setup(ds={**NO_CLIPPING, **BF16, **zero(1, compute_grad_norm=False)}),
    ),
    "compute-grad-norm-needed:zero_optimization.compute_grad_norm": (
        Setup(ds=zero(1, compute_grad_norm=False)),  # DeepSpeed clips by default
        Setup(ds={**NO_CLIPPING, **zero(1, compute_grad_norm=False)}),
    ),
    "offload-ratio-stage:zero_optimization.offload_optimizer.ratio": (
        Setup(ds=zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})),
        Setup(ds=zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})),
    ),
    "superoffload-stage:zero_optimization.offload_optimizer.super_offload": (
        Setup(ds=zero(2, offload_optimizer=SUPER)),
        Setup(ds=zero(2, offload_optimizer={**SUPER, "super_offload": False})),
    ),
    "superoffload-optimizer:optimizer.type": (
        Setup(ds={**zero(3, offload_optimizer=SUPER), **LION}),
        Setup(ds={**zero(3, offload_optimizer=CPU_OFFLOAD), **LION}),
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
    "master-weights-stage:fp16.fp16_master_weights_and_grads": (
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(1)}),
    ),
    "master-weights-stage:bf16.bf16_master_weights_and_grads": (
        Setup(ds={"bf16": MASTER}),
        Setup(ds={"bf16": MASTER, **zero(1)}),
    ),
    "bf16-optimizer-states:bf16.bf16_optimizer_states": (
        Setup(ds={"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(1)}),
        Setup(ds={"bf16": {**MASTER, "bf16_optimizer_states": True}, **zero(1)}),
    ),
    "loss-scale:fp16.loss_scale": (
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0}}),
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0, "loss_scale": 128}}),
    ),
    "grad-accum-mix:data_types.grad_accum_dtype": (
        Setup(ds={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ),
    # ---- What ranks send each other, and in what
    "zeropp-hpz-stage:zero_optimization.zero_hpz_partition_size": (
        Setup(ds=zero(2, zero_hpz_partition_size=2)),
        Setup(ds=zero(2, zero_hpz_partition_size=1)),
    ),
    "zeropp-hpz-size:zero_optimization.zero_hpz_partition_size": (
        Setup(ds=zero(3, zero_hpz_partition_size=3), slots=4),
        Setup(ds=zero(3, zero_hpz_partition_size=8), slots=4),  # more than there are: all of them
    ),
    **{
        f"zeropp-quantized-{what}:{ZERO}.{key}": (broken, Setup(ds=zero(3, **{key: True})))
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
        for what, broken in (
            ("stage", Setup(ds=zero(2, **{key: True}))),
            ("cuda", Setup(ds=zero(3, **{key: True}), accelerator=CPU)),
        )
    },
    "zeropp-gradients-machines:zero_optimization.zero_quantized_gradients": (
        Setup(ds={**BF16, **zero(3, zero_quantized_gradients=True)}, machines=2),
        Setup(
            ds={**BF16, "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)},
            machines=2,
        ),
    ),
    "allreduce-sum:gradient_allreduce_op": (
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(3)}),
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(2)}),
    ),
    **{
        f"gradients-scaled-before:{key}": (
            Setup(ds={key: value, **zero(2)}),
            Setup(ds={key: value, **zero(2, reduce_scatter=False)}),
        )
        for key, value in (("prescale_gradients", True), ("gradient_predivide_factor", 2.0))
    },
    "allgather-bucket-odd:zero_optimization.allgather_bucket_size": (
        Setup(ds=zero(1, allgather_bucket_size=500_000_001)),
        Setup(ds=zero(3, allgather_bucket_size=500_000_001)),
    ),
    "allgather-bucket-unheeded:zero_optimization.allgather_bucket_size": (
        Setup(ds=zero(2, allgather_bucket_size=200_000_000)),
        Setup(ds=zero(2, allgather_bucket_size=500_000_000)),
    ),
    "autocast-communication:communication_data_type": (
        Setup(ds={**AUTOCAST, "communication_data_type": "fp16", **zero(1)}),
        Setup(ds={**AUTOCAST, "communication_data_type": "fp16", **zero(0)}),
    ),
    "sequence-communication:communication_data_type": (
        Setup(ds={"communication_data_type": "bf16"}, sequence=2),
        Setup(
            ds={"communication_data_type": "bf16", "seq_parallel_communication_data_type": "bf16"}, sequence=2
        ),
    ),
    "pipeline-overlap:zero_optimization.overlap_comm": (
        Setup(ds=zero(1, overlap_comm=True), pipe=2),
        Setup(ds=zero(1, overlap_comm=True)),
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
    "contiguous-checkpoints:activation_checkpointing.contiguous_memory_optimization": (
        Setup(ds={"activation_checkpointing": CONTIGUOUS}),
        Setup(
            ds={
                "activation_checkpointing": {
                    **CONTIGUOUS,
                    "number_checkpoints": 2,
                    "partition_activations": True,
                }
            }
        ),
    ),
    "deepcompile-cuda:compile.deepcompile": (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, accelerator=CPU),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    "deepcompile-stage:compile.deepcompile": (
        Setup(ds={**zero(0), "compile": {"deepcompile": True}}),
        Setup(ds={**zero(2), "compile": {"deepcompile": True}}),
    ),
    "memory-breakdown-peak:memory_breakdown": (
        Setup(ds={"memory_breakdown": True}, accelerator=CUDA),
        Setup(ds={"memory_breakdown": True}, accelerator=CPU),
    ),
}
