"""Which optimizers run where: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import SGD, Cases, Setup, zero

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
}
