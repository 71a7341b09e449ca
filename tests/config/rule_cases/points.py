"""What the cases of the rules are made of: points, and parts of a DeepSpeed JSON that several use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from determined_ds.config.accelerator import Accelerator
from determined_ds.documents.document import KeyPath
from tests.making import CUDA

ZERO = "zero_optimization"
FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration; the rest is two replicas and a batch that divides."""

    ds: dict[str, Any] = field(default_factory=dict)
    pipe: int = 1
    model: int = 1
    sequence: int = 1
    slots: int = 2
    accelerator: Accelerator = CUDA
    machines: int = 1
    hyperparameters: dict[str, Any] = field(default_factory=dict)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **settings}}


CPU_OFFLOAD, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
MASTER = {"enabled": True, "bf16_master_weights_and_grads": True}
CONTIGUOUS = {"contiguous_memory_optimization": True}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.001, "muon_lr": 0.02}}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

# (code, key) of a rule -> (what breaks it, its neighbour that does not).
Cases: TypeAlias = dict[tuple[str, KeyPath], tuple[Setup, Setup]]
