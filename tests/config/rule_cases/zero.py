"""What each ZeRO stage can offload and leave out: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import CPU_OFFLOAD, NVME, ZERO, Cases, Setup, zero
from tests.making import CPU

SUPER = {"device": "cpu", "super_offload": True}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}}

CASES: Cases = {
    ("offload-param-stage", (ZERO, "offload_param")): (
        Setup(ds=zero(2, offload_param=CPU_OFFLOAD)),
        Setup(ds=zero(3, offload_param=CPU_OFFLOAD)),
    ),
    ("offload-optimizer-stage", (ZERO, "offload_optimizer")): (
        Setup(ds=zero(0, offload_optimizer=CPU_OFFLOAD)),
        Setup(ds=zero(1, offload_optimizer=CPU_OFFLOAD)),
    ),
    ("offload-nvme-stage", (ZERO, "offload_optimizer", "device")): (
        Setup(ds=zero(2, offload_optimizer=NVME)),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    ("offload-nvme-path", (ZERO, "offload_optimizer", "device")): (
        Setup(ds=zero(3, offload_optimizer={"device": "nvme"})),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    ("offload-nvme-path", (ZERO, "offload_param", "device")): (
        Setup(ds=zero(3, offload_param={"device": "nvme"})),
        Setup(ds=zero(3, offload_param=NVME)),
    ),
    ("compute-grad-norm-stage", (ZERO, "compute_grad_norm")): (
        Setup(ds=zero(3, compute_grad_norm=False)),
        Setup(ds=zero(2, compute_grad_norm=False)),
    ),
    ("offload-ratio-stage", (ZERO, "offload_optimizer", "ratio")): (
        Setup(ds=zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})),
        Setup(ds=zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})),
    ),
    ("superoffload-cuda", (ZERO, "offload_optimizer", "super_offload")): (
        Setup(ds=zero(3, offload_optimizer=SUPER), accelerator=CPU),
        Setup(ds=zero(3, offload_optimizer=SUPER)),
    ),
    ("superoffload-stage", (ZERO, "offload_optimizer", "super_offload")): (
        Setup(ds=zero(2, offload_optimizer=SUPER)),
        Setup(ds=zero(2, offload_optimizer={**SUPER, "super_offload": False})),
    ),
    ("superoffload-optimizer", ("optimizer", "type")): (
        Setup(ds={**zero(3, offload_optimizer=SUPER), **LION}),
        Setup(ds={**zero(3, offload_optimizer=CPU_OFFLOAD), **LION}),
    ),
    ("zenflow-batch", (ZERO, "zenflow")): (
        Setup(ds=zero(2, offload_optimizer=CPU_OFFLOAD, zenflow={"topk_ratio": 0.1})),
        Setup(ds=zero(2, offload_optimizer=CPU_OFFLOAD)),
    ),
}
