"""What is computed and kept in 16 bits: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import FP16, MASTER, Cases, Setup, zero
from tests.making import CPU

CASES: Cases = {
    ("fp16-and-bf16", ("fp16", "enabled")): (
        Setup(ds={**FP16, "bf16": {"enabled": True}}),
        Setup(ds={**FP16, "bf16": {"enabled": False}}),
    ),
    ("fp16-unsupported", ("fp16", "enabled")): (Setup(ds=FP16, accelerator=CPU), Setup(ds=FP16)),
    ("master-weights-stage", ("fp16", "fp16_master_weights_and_grads")): (
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(1)}),
    ),
    ("master-weights-stage", ("bf16", "bf16_master_weights_and_grads")): (
        Setup(ds={"bf16": MASTER}),
        Setup(ds={"bf16": MASTER, **zero(1)}),
    ),
    ("bf16-optimizer-states", ("bf16", "bf16_optimizer_states")): (
        Setup(ds={"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(1)}),
        Setup(ds={"bf16": {**MASTER, "bf16_optimizer_states": True}, **zero(1)}),
    ),
    ("loss-scale", ("fp16", "loss_scale")): (
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0}}),
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0, "loss_scale": 128}}),
    ),
    ("grad-accum-mix", ("data_types", "grad_accum_dtype")): (
        Setup(ds={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ),
}
