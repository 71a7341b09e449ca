"""Which optimizers run where."""

from __future__ import annotations

from determined_ds.config.deepspeed.normalized import ONE_BIT
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
)
