"""What ranks send each other, and in what."""

from __future__ import annotations

from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import CONFIG, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="zeropp-hpz-stage",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.hpz > 1 and f.zero_stage != 3,
        message="ZeRO++ secondary partitions need ZeRO stage 3, not {zero_stage}",
        fix="set zero_optimization.stage to 3, or zero_hpz_partition_size to 1",
        source="deepspeed 0.19.8 runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209",
    ),
    Rule(
        code="zeropp-hpz-size",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.hpz > 1 and f.slots % min(f.hpz, f.slots) != 0,
        message="{slots} slots cannot be split into secondary partitions of {hpz}",
        fix="use a zero_hpz_partition_size that divides the slots (usually the GPUs of one node)",
        source="deepspeed 0.19.8 utils/groups.py _create_zero_param_parallel_group",
    ),
    *(
        rule
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
        for rule in (
            Rule(
                code="zeropp-quantized-stage",
                key=(ZERO, key),
                breaks=lambda f, key=key: bool(f.zero(key)) and f.zero_stage != 3,  # type: ignore[misc]
                message="ZeRO++ quantization needs ZeRO stage 3, not {zero_stage}",
                fix=f"set zero_optimization.stage to 3, or {key} to false",
                source="deepspeed 0.19.8 runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209",
            ),
            Rule(
                code="zeropp-quantized-cuda",
                key=(ZERO, key),
                breaks=lambda f, key=key: bool(f.zero(key)) and f.accelerator.name != "cuda",  # type: ignore[misc]
                message="ZeRO++ quantization runs in CUDA kernels, and there is no CUDA device",
                fix=f"run it on GPUs, or set {key} to false",
                source="deepspeed 0.19.8 ops/op_builder/cpu/no_impl.py NotImplementedBuilder",
            ),
        )
    ),
    Rule(
        code="zeropp-gradients-machines",
        key=(ZERO, "zero_quantized_gradients"),
        breaks=lambda f: (
            bool(f.zero("zero_quantized_gradients")) and f.machines > 1 and f.communication_dtype != "fp16"
        ),
        message="on {machines} machines the kernel reads gradients as fp16, and these are {communication_dtype}:"
        " it would train on other numbers",
        fix='add "communication_data_type": "fp16", or set zero_quantized_gradients to false',
        source="deepspeed 0.19.8 runtime/comm/coalesced_collectives.py all_to_all_quant_reduce",
    ),
    Rule(
        code="allreduce-sum",
        key=("gradient_allreduce_op",),
        breaks=lambda f: (
            str(f.ds.get(("gradient_allreduce_op",))).lower() == "sum"
            and (f.zero_stage == 3 or bool(f.zero("zenflow")) or f.strategy.deepcompile)
        ),
        message="gradients cannot be summed with ZeRO stage 3, ZenFlow or DeepCompile",
        fix='set gradient_allreduce_op to "mean"',
        source=CONFIG,
    ),
    *(
        Rule(
            code="gradients-scaled-before",
            key=(key,),
            breaks=lambda f, key=key, idle=idle: (  # type: ignore[misc]
                f.reduces_in_parts and f.ds.get((key,)) not in (None, idle)
            ),
            message="gradients are scaled before they are summed at ZeRO stage 0 and 1 only, not at {zero_stage}",
            fix=f"remove {key}, or add zero_optimization.reduce_scatter: false",
            source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__",
        )
        for key, idle in (("prescale_gradients", False), ("gradient_predivide_factor", 1))
    ),
    Rule(
        code="allgather-bucket-odd",
        key=(ZERO, "allgather_bucket_size"),
        breaks=lambda f: f.zero_stage in (1, 2) and f.ds.get((ZERO, "allgather_bucket_size"), 0) % 2 == 1,
        message="ZeRO stages 1 and 2 take an even number of elements only",
        fix="remove it: nothing else is done with it",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__",
    ),
    Rule(
        code="allgather-bucket-unheeded",
        key=(ZERO, "allgather_bucket_size"),
        breaks=lambda f: f.zero("allgather_bucket_size") not in (None, 500_000_000) and not f.zero("zenflow"),
        message="has no effect: with torch 1.13 and later a parameter group is gathered by one operation",
        fix="remove it",
        source="deepspeed 0.19.8 runtime/utils.py all_gather_dp_groups; comm/torch.py has_all_gather_into_tensor",
        warning=True,
    ),
    Rule(
        code="autocast-communication",
        key=("communication_data_type",),
        breaks=lambda f: (
            f.enabled("torch_autocast") and f.zero_stage > 0 and bool(f.ds.get(("communication_data_type",)))
        ),
        message="has no effect under torch_autocast with ZeRO: the gradients of the layers that compute in 16 bits are"
        " summed in 16 bits, the others in fp32",
        fix="remove it; torch_autocast.lower_precision_safe_modules says which layers those are",
        source="deepspeed 0.19.8 runtime/base_optimizer.py get_param_comm_dtype",
        warning=True,
    ),
    Rule(
        code="sequence-communication",
        key=("communication_data_type",),
        breaks=lambda f: (
            f.topology.sequence_parallel_size > 1
            and bool(f.ds.get(("communication_data_type",)))
            and f.ds.get(("communication_data_type",))
            != f.ds.get(("seq_parallel_communication_data_type",), "fp32")
        ),
        message="has no effect with sequence_parallel_size {topology.sequence_parallel_size}, where"
        " seq_parallel_communication_data_type (default: fp32) is taken",
        fix="write seq_parallel_communication_data_type",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_distributed_model",
        warning=True,
    ),
    Rule(
        code="pipeline-overlap",
        key=(ZERO, "overlap_comm"),
        breaks=lambda f: f.pipe > 1 and f.zero_stage > 0 and bool(f.zero("overlap_comm")),
        message="has no effect in a pipeline: gradients are summed after the last backward pass",
        fix="remove it",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_zero_optimizer",
        warning=True,
    ),
    Rule(
        code="zeropp-autocast",
        key=(ZERO, "zero_quantized_weights"),
        breaks=lambda f: f.enabled("torch_autocast") and bool(f.zero("zero_quantized_weights")),
        message="weights cannot be quantized for communication under torch_autocast",
        fix="enable bf16 or fp16 in place of torch_autocast, or set zero_quantized_weights to false",
        source="deepspeed 0.19.8 runtime/torch_autocast.py _validate_auto_cast_settings",
    ),
    Rule(
        code="zeropp-gradients-scatter",
        key=(ZERO, "reduce_scatter"),
        breaks=lambda f: bool(f.zero("zero_quantized_gradients")) and f.zero("reduce_scatter") is False,
        message="quantized gradients are summed in parts, which reduce_scatter: false excludes",
        fix="remove reduce_scatter, or set zero_quantized_gradients to false",
        source="deepspeed 0.19.8 runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.__init__",
    ),
)
