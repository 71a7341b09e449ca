"""What each ZeRO stage can offload and leave out."""

from __future__ import annotations

from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="offload-param-stage",
        key=(ZERO, "offload_param"),
        breaks=lambda f: f.strategy.offload_param is not None and f.zero_stage != 3,
        message="parameters can be offloaded only where they are partitioned: ZeRO stage 3, not {zero_stage}",
        fix="set zero_optimization.stage to 3, or remove offload_param",
        source="deepspeed 0.19.8 runtime/zero/offload_config.py",
    ),
    Rule(
        code="offload-optimizer-stage",
        key=(ZERO, "offload_optimizer"),
        breaks=lambda f: f.strategy.offload_optimizer is not None and f.zero_stage < 1,
        message="the optimizer can be offloaded from ZeRO stage 1 on, not at stage {zero_stage}",
        fix="set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (older texts say 2 and 3)",
    ),
    Rule(
        code="offload-nvme-stage",
        key=(ZERO, "offload_optimizer", "device"),
        breaks=lambda f: f.strategy.offload_optimizer == "nvme" and f.zero_stage != 3,
        message="the optimizer can be offloaded to nvme at ZeRO stage 3 only, not {zero_stage}",
        fix="use device cpu, or ZeRO stage 3",
        source="deepspeed 0.19.8 runtime/zero/stage3.py (only stage 3 has swap_optimizer)",
    ),
    *(
        Rule(
            code="offload-nvme-path",
            key=(ZERO, what, "device"),
            breaks=lambda f, what=what: (  # type: ignore[misc]
                getattr(f.strategy, what) == "nvme" and not f.zero(what).get("nvme_path")
            ),
            message="offload to nvme needs a path to put the files",
            fix=f"add zero_optimization.{what}.nvme_path",
            source="deepspeed 0.19.8 runtime/zero/offload_config.py",
        )
        for what in ("offload_optimizer", "offload_param")
    ),
    Rule(
        code="compute-grad-norm-stage",
        key=(ZERO, "compute_grad_norm"),
        breaks=lambda f: f.zero("compute_grad_norm") is False and f.zero_stage not in (1, 2),
        message="the gradient's norm can be left out at ZeRO stage 1 or 2 only, not {zero_stage}",
        fix="set zero_optimization.stage to 1 or 2, or remove compute_grad_norm",
        source="deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig.compute_grad_norm_valid",
    ),
    Rule(
        code="offload-ratio-stage",
        key=(ZERO, "offload_optimizer", "ratio"),
        breaks=lambda f: f.ds.get((ZERO, "offload_optimizer", "ratio"), 1) < 1 and f.zero_stage != 3,
        message="the optimizer can be offloaded in part at ZeRO stage 3 only, not {zero_stage}",
        fix="set offload_optimizer.ratio to 1, or zero_optimization.stage to 3",
        source="deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig.offload_ratio_check",
    ),
    Rule(
        code="superoffload-cuda",
        key=(ZERO, "offload_optimizer", "super_offload"),
        breaks=lambda f: f.super_offload and f.zero_stage == 3 and f.accelerator.name != "cuda",
        message="SuperOffload is written for CUDA, and there is no CUDA device",
        fix="run it on GPUs, or remove super_offload",
        source="deepspeed 0.19.8 runtime/superoffload/superoffload_stage3.py _validate_superoffload_accelerator",
    ),
    Rule(
        code="superoffload-stage",
        key=(ZERO, "offload_optimizer", "super_offload"),
        breaks=lambda f: f.super_offload and f.zero_stage != 3,
        message="has no effect at ZeRO stage {zero_stage}: SuperOffload is an optimizer of stage 3",
        fix="set zero_optimization.stage to 3, or remove super_offload",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_zero_optimizer",
    ),
    Rule(
        code="superoffload-optimizer",
        key=("optimizer", "type"),
        breaks=lambda f: (
            f.super_offload and f.zero_stage == 3 and f.optimizer_type.lower() not in ("", "adam", "adamw")
        ),
        message="SuperOffload steps Adam and AdamW only, and this is {optimizer_type}",
        fix="use AdamW, or remove super_offload",
        source="deepspeed 0.19.8 runtime/superoffload/superoffload_stage3.py SuperOffloadOptimizer_Stage3.__init__",
    ),
    Rule(
        code="zenflow-batch",
        key=(ZERO, "zenflow"),
        breaks=lambda f: f.zero("zenflow") is not None,
        message="ZenFlow steps after every micro-batch and sets gradient_accumulation_steps to its update_interval:"
        " a step would not be a global batch",
        fix="remove zenflow; offload_optimizer alone keeps the batch",
        source="deepspeed 0.19.8 runtime/zenflow/engine.py configure_zenflow",
    ),
)
