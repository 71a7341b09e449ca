"""Activation checkpointing, compilers, DeepSpeed's instruments: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import CONTIGUOUS, Cases, Setup, zero
from tests.making import CPU, CUDA

CASES: Cases = {
    ("cpu-checkpointing", ("activation_checkpointing", "cpu_checkpointing")): (
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CPU),
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CUDA),
    ),
    ("contiguous-checkpoints", ("activation_checkpointing", "contiguous_memory_optimization")): (
        Setup(ds={"activation_checkpointing": CONTIGUOUS}),
        Setup(
            ds={
                "activation_checkpointing": {
                    **CONTIGUOUS,
                    "number_checkpoints": 2,
                    "partition_activations": True,
                }
            }
        ),
    ),
    ("deepcompile-cuda", ("compile", "deepcompile")): (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, accelerator=CPU),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    ("deepcompile-stage", ("compile", "deepcompile")): (
        Setup(ds={**zero(0), "compile": {"deepcompile": True}}),
        Setup(ds={**zero(2), "compile": {"deepcompile": True}}),
    ),
    ("memory-breakdown-peak", ("memory_breakdown",)): (
        Setup(ds={"memory_breakdown": True}, accelerator=CUDA),
        Setup(ds={"memory_breakdown": True}, accelerator=CPU),
    ),
}
