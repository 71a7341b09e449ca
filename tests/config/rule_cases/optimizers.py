"""Which optimizers run where: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import BF16, MUON, SGD, ZERO, Cases, Setup, zero

CASES: Cases = {
    ("onebit", ("optimizer", "type")): (
        Setup(ds={"optimizer": {"type": "OneBitAdam"}}),
        Setup(ds={"optimizer": {"type": "AdamW"}}),
    ),
    ("optimizer-nvcc", ("optimizer", "type")): (
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}),
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}),
    ),
    ("zero-untested-optimizer", ("optimizer", "type")): (
        Setup(ds={**zero(1), **SGD}),
        Setup(ds={**zero(1), **SGD, "zero_allow_untested_optimizer": True}),
    ),
    ("muon-reduce-scatter", (ZERO, "reduce_scatter")): (
        Setup(ds={**MUON, **zero(3)}),
        Setup(ds={**MUON, **zero(3, reduce_scatter=False)}),
    ),
    ("muon-clipping", ("gradient_clipping",)): (
        Setup(ds={**MUON, **zero(1), "gradient_clipping": 1.0}),
        Setup(ds={**MUON, **zero(0), "gradient_clipping": 1.0}),
    ),
    ("muon-rates", ("scheduler", "params", "warmup_max_lr")): (
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}}),
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}),
    ),
    ("muon-rates-pipeline", ("scheduler", "params", "warmup_max_lr")): (
        Setup(
            ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}, pipe=2
        ),
        Setup(ds={**MUON, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.001]}}}),
    ),
    ("muon-bf16-pipeline", ("data_types", "grad_accum_dtype")): (
        Setup(ds={**MUON, **BF16, **zero(1), "data_types": {"grad_accum_dtype": "fp32"}}, pipe=2),
        Setup(ds={**MUON, **BF16, **zero(1), "data_types": {"grad_accum_dtype": "bf16"}}, pipe=2),
    ),
}
