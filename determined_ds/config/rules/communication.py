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
)
