"""Which optimizers run where."""

from __future__ import annotations

from determined_ds.config.deepspeed.normalized import ONE_BIT
from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="onebit",
        key=("optimizer", "type"),
        breaks=lambda f: f.optimizer_type.lower() in ONE_BIT,
        message="1-bit optimizers are gone from DeepSpeed, and their compression backends with them",
        fix="use AdamW",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer",
    ),
    Rule(
        code="zero-untested-optimizer",
        key=("optimizer", "type"),
        breaks=lambda f: (
            f.zero_stage > 0 and not f.zero_takes_optimizer and f.optimizer_type.lower() not in ONE_BIT
        ),
        message="ZeRO stage {zero_stage} takes Adam, AdamW, Adagrad, Lion and Muon, and refuses {optimizer_type}",
        fix='use AdamW, set zero_optimization.stage to 0, or add "zero_allow_untested_optimizer": true',
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check",
    ),
    Rule(
        code="optimizer-nvcc",
        key=("optimizer", "type"),
        breaks=lambda f: f.compiles_optimizer,
        message="DeepSpeed's own {optimizer_type} is compiled by nvcc before the first step, on every machine",
        fix="use an image with the CUDA toolkit, or AdamW with torch_adam and fused left out, which takes torch's",
        source="deepspeed 0.19.8 ops/adam/fused_adam.py, ops/lion/fused_lion.py, ops/lamb/fused_lamb.py",
        warning=True,
    ),
    Rule(
        code="muon-reduce-scatter",
        key=(ZERO, "reduce_scatter"),
        breaks=lambda f: f.is_muon and f.zero_stage == 3 and f.zero("reduce_scatter") is not False,
        message="Muon needs the whole gradient of a matrix, which ZeRO 3 hands out in parts",
        fix="add zero_optimization.reduce_scatter: false, or set zero_optimization.stage to 2",
        source="deepspeed 0.19.8 runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.__init__",
    ),
    Rule(
        code="muon-clipping",
        key=("gradient_clipping",),
        breaks=lambda f: (
            f.is_muon
            and f.zero_stage > 0
            and not f.uses_bf16_optimizer
            and bool(f.ds.get(("gradient_clipping",)))
        ),
        message="under ZeRO it clips Muon's updates, which are of a fixed size, and not the gradients: steps become"
        " many times smaller than without ZeRO",
        fix="set gradient_clipping to 0",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.step; tests/trial/test_muon.py",
        warning=True,
    ),
    Rule(
        code="muon-rates",
        key=("scheduler", "params", "warmup_max_lr"),
        breaks=lambda f: (
            f.is_muon
            and isinstance(f.ds.get(("scheduler", "params", "warmup_max_lr")), (int, float))
            and any(f.ds.get(("optimizer", "params", name)) is not None for name in ("muon_lr", "adam_lr"))
        ),
        message="the schedule gives all parameters this rate: muon_lr and adam_lr have no effect",
        fix="write a list, a rate for each parameter group: of each group its matrices, then the rest",
        source="deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR._format_param",
    ),
    Rule(
        code="muon-rates-pipeline",
        key=("scheduler", "params", "warmup_max_lr"),
        breaks=lambda f: (
            f.is_muon
            and f.pipe > 1
            and isinstance(f.ds.get(("scheduler", "params", "warmup_max_lr")), (list, tuple))
        ),
        message="a stage without an embedding has fewer parameter groups than one with it, and a list has one length",
        fix="write one rate, for muon_lr and adam_lr alike",
        source="deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR._format_param; runtime/engine.py _muon_param_groups",
    ),
    Rule(
        code="muon-bf16-pipeline",
        key=("data_types", "grad_accum_dtype"),
        breaks=lambda f: f.is_muon and f.pipe > 1 and f.uses_bf16_optimizer,
        message="in a bf16 pipeline Muon does not accumulate gradients in fp32",
        fix="set data_types.grad_accum_dtype to bf16, or use AdamW",
        source="deepspeed 0.19.8 runtime/bf16_optimizer.py BF16_Optimizer.__init__",
    ),
)
