"""What the rules of the compatibility table look at, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.batch import Batch
from determined_ds.config.topology import Topology
from determined_ds.documents.document import Document, KeyPath

ZERO = "zero_optimization"
# How DeepSpeed writes them. Source: deepspeed 0.19.8 runtime/config.py DtypeEnum.
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "half", "float16", "torch.float16", "torch.half"), "fp16"),
}
# Of the optimizers that a JSON can name, those that ZeRO takes; the mu- ones make an Adam of torch's.
# Source: deepspeed 0.19.8 runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS; mup's optim.py.
ZERO_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at.

    Args:
        ds: The DeepSpeed JSON with every "auto" filled.
        topology: The parallel degrees.
        batch: The completed batch.
        accelerator: What the ranks compute on.
        machines: Machines that the slots are spread over.
    """

    ds: Document
    topology: Topology
    batch: Batch
    accelerator: Accelerator
    machines: int = 1

    @cached_property
    def zero_stage(self) -> int:
        return int(self.zero("stage", 0) or 0)

    @cached_property
    def _zero(self) -> dict[str, Any]:
        section = self.ds.get((ZERO,))
        return section if isinstance(section, dict) else {}

    def zero(self, key: str, default: Any = None) -> Any:
        return self._zero.get(key, default)

    def offload_device(self, what: str) -> str | None:
        """``cpu`` or ``nvme`` where ``what`` (offload_optimizer, offload_param) is offloaded, else None."""
        section = self.zero(what)
        device = section.get("device") if isinstance(section, dict) else None
        return None if device in (None, "none") else str(device)

    @property
    def offload_ratio(self) -> float:
        return float(self.ds.get((ZERO, "offload_optimizer", "ratio"), 1))

    @property
    def precision(self) -> str:
        """What the model computes in: ``fp16``, ``bf16`` or ``fp32``."""
        return next((name for name in ("fp16", "bf16") if self.enabled(name)), "fp32")

    @property
    def communication_dtype(self) -> str:
        """What gradients are reduced in; what the model computes in, unless stated."""
        return DTYPES.get(str(self.ds.get(("communication_data_type",))).lower(), self.precision)

    @property
    def grad_accum_dtype(self) -> str:
        """What gradients are accumulated in; what the model computes in, unless stated."""
        stated = self.ds.get(("data_types", "grad_accum_dtype"))
        return DTYPES.get(str(stated).lower(), self.precision)

    def enabled(self, section: str) -> bool:
        return bool(self.ds.get((section, "enabled"), False))

    @property
    def pipe(self) -> int:
        return self.topology.pipe_parallel_size

    @property
    def micro_batches(self) -> int:
        return self.batch.accumulation

    @property
    def slots(self) -> int:
        return self.topology.slots

    @cached_property
    def hpz(self) -> int:
        return int(self.zero("zero_hpz_partition_size", 1) or 1)

    @property
    def max_ranks(self) -> int:
        return self.accelerator.max_ranks * self.machines

    @property
    def num_devices(self) -> int:
        return self.accelerator.num_devices

    @property
    def deepcompile(self) -> bool:
        return bool(self.ds.get(("compile", "deepcompile")))

    @property
    def optimizer_type(self) -> str:
        return str(self.ds.get(("optimizer", "type"), ""))

    @property
    def compiles_optimizer(self) -> bool:
        """Whether DeepSpeed has nvcc build the optimizer that the JSON names, at its first use.

        Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
        """
        kind = self.optimizer_type.lower()
        if self.accelerator.name != "cuda" or kind not in ("adam", "adamw", "lamb", "lion"):
            return False
        if kind != "lamb" and self.offload_device("offload_optimizer") is not None:
            return False  # built by g++, for the CPU
        return not self.ds.get(("optimizer", "params", "torch_adam"))

    @property
    def zero_takes_optimizer(self) -> bool:
        """Whether ZeRO takes the optimizer that the JSON names, if it names one."""
        kind = self.optimizer_type.lower()
        return kind in ("", *ZERO_OPTIMIZERS) or bool(self.ds.get(("zero_allow_untested_optimizer",)))

    def checkpointing(self, key: str) -> Any:
        """A value of ``activation_checkpointing``."""
        return self.ds.get(("activation_checkpointing", key))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the compatibility table.

    Args:
        code: Short stable name.
        key: The key that is named in the problem; the value and origin are looked up there.
        breaks: True where the rule is broken.
        message: What does not go together; ``{fact}`` is filled from :class:`Facts`.
        fix: What to write instead.
        source: Where upstream the rule comes from.
        warning: True where the run is possible but probably not meant so.
    """

    code: str
    key: KeyPath
    breaks: Callable[[Facts], bool]
    message: str
    fix: str
    source: str
    warning: bool = False
