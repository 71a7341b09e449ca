"""What is computed and kept in 16 bits."""

from __future__ import annotations

from determined_ds.config.rules.rule import CONFIG, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="fp16-and-bf16",
        key=("fp16", "enabled"),
        breaks=lambda f: f.enabled("fp16") and f.enabled("bf16"),
        message="fp16 and bf16 exclude each other, and both are enabled",
        fix="disable one of them",
        source="deepspeed 0.19.8 runtime/config.py DeepSpeedConfig._initialize_params",
    ),
    Rule(
        code="fp16-unsupported",
        key=("fp16", "enabled"),
        breaks=lambda f: f.enabled("fp16") and not f.accelerator.fp16,
        message="this accelerator does not train in fp16",
        fix='set fp16.enabled to "auto" or false, or bf16.enabled to true',
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_sanity_check",
    ),
    *(
        Rule(
            code="master-weights-stage",
            key=(section, f"{section}_master_weights_and_grads"),
            breaks=lambda f, section=section: (  # type: ignore[misc]
                bool(f.ds.get((section, f"{section}_master_weights_and_grads"))) and f.zero_stage < 1
            ),
            message="16-bit master weights need ZeRO stage 1, 2 or 3, not {zero_stage}",
            fix=f"set zero_optimization.stage to 1, or remove {section}_master_weights_and_grads",
            source=CONFIG,
        )
        for section in ("fp16", "bf16")
    ),
    Rule(
        code="bf16-optimizer-states",
        key=("bf16", "bf16_optimizer_states"),
        breaks=lambda f: (
            bool(f.ds.get(("bf16", "bf16_optimizer_states")))
            and not (f.zero_stage and f.ds.get(("bf16", "bf16_master_weights_and_grads")))
        ),
        message="bf16 optimizer states need bf16_master_weights_and_grads, and ZeRO stage 1, 2 or 3",
        fix="enable bf16.bf16_master_weights_and_grads and ZeRO, or remove bf16_optimizer_states",
        source=CONFIG,
    ),
    Rule(
        code="loss-scale",
        key=("fp16", "loss_scale"),
        breaks=lambda f: (
            f.enabled("fp16")
            and not f.ds.get(("fp16", "loss_scale"), 0)
            and min(f.ds.get(("fp16", key), 1) for key in ("loss_scale_window", "min_loss_scale")) <= 0
        ),
        message="dynamic loss scaling needs loss_scale_window and min_loss_scale above 0",
        fix="write values above 0, or a fixed loss_scale",
        source="deepspeed 0.19.8 runtime/precision_config.py DeepSpeedFP16Config",
    ),
    Rule(
        code="grad-accum-mix",
        key=("data_types", "grad_accum_dtype"),
        breaks=lambda f: f.zero_stage == 0 and f.strategy.grad_dtype != f.strategy.precision,
        message="without ZeRO, gradients are accumulated in what the model computes in, {strategy.precision}",
        fix="remove data_types.grad_accum_dtype, or set zero_optimization.stage to 1",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check",
    ),
)
