"""What DeepSpeed compiles at the first use for a configuration, and what that takes: one table, a row an extension.

A row says for which configurations an extension is built, and the tools that building it takes. DeepSpeed builds at run
time unless its package was installed with the extension built in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from determined_ds.config.facts import ZERO, Facts
from determined_ds.config.strategy import QUANTIZED
from determined_ds.documents.document import KeyPath

NVCC, CXX, NINJA, LIBAIO = "nvcc", "c++", "ninja", "libaio"
OPTIMIZER = ("optimizer", "type")
USE_TORCHS = "set optimizer.params.torch_adam to true, which takes torch's own AdamW"


@dataclass(frozen=True, kw_only=True)
class Op:
    """An extension of DeepSpeed's.

    Args:
        name: DeepSpeed's, which its folder of built extensions has too.
        key: The key that asks for it.
        tools: What building it takes.
        instead: A configuration that does without it.
        builds: Whether a configuration has it built.
        source: Where upstream that is decided.
    """

    name: str
    key: KeyPath
    tools: tuple[str, ...]
    instead: str
    builds: Callable[[Facts], bool]
    source: str


def _kind(f: Facts) -> str:
    return f.optimizer_type.lower()


def _is_offloaded(f: Facts) -> bool:
    return f.strategy.offload_optimizer is not None


def _uses_torch_adam(f: Facts) -> bool:
    return bool(f.ds.get(("optimizer", "params", "torch_adam")))


def _on_nvme(f: Facts) -> bool:
    return "nvme" in (f.strategy.offload_optimizer, f.strategy.offload_param)


def _is_adam(f: Facts) -> bool:
    return _kind(f) in ("adam", "adamw")


ENGINE = "deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer"
SWAPPER = "deepspeed 0.19.8 runtime/swap_tensor/*_swapper.py; ops/op_builder/async_io.py"
ON_HOST = (CXX, NINJA)
ON_DEVICE = (NVCC, CXX, NINJA)

OPS = (
    Op(
        name="fused_adam",
        key=OPTIMIZER,
        tools=ON_DEVICE,
        instead=USE_TORCHS,
        builds=lambda f: f.compiles_optimizer and _is_adam(f),
        source=f"{ENGINE}; ops/op_builder/fused_adam.py",
    ),
    Op(
        name="fused_lamb",
        key=OPTIMIZER,
        tools=ON_DEVICE,
        instead="use AdamW with torch_adam: true",
        builds=lambda f: f.compiles_optimizer and _kind(f) == "lamb",
        source=f"{ENGINE}; ops/op_builder/fused_lamb.py",
    ),
    Op(
        name="fused_lion",
        key=OPTIMIZER,
        tools=ON_DEVICE,
        instead="use AdamW with torch_adam: true",
        builds=lambda f: f.compiles_optimizer and _kind(f) == "lion",
        source=f"{ENGINE}; ops/op_builder/fused_lion.py",
    ),
    Op(
        name="fused_adam",  # that of the CPU accelerator
        key=OPTIMIZER,
        tools=ON_HOST,
        instead=USE_TORCHS,
        builds=lambda f: (
            f.accelerator.name == "cpu" and _is_adam(f) and not _is_offloaded(f) and not _uses_torch_adam(f)
        ),
        source=f"{ENGINE}; ops/op_builder/cpu/fused_adam.py",
    ),
    Op(
        name="cpu_adam",
        key=(ZERO, "offload_optimizer"),
        tools=ON_HOST,
        instead="remove zero_optimization.offload_optimizer",
        builds=lambda f: _is_offloaded(f) and _is_adam(f) and not _uses_torch_adam(f),
        source=f"{ENGINE}; ops/op_builder/cpu/cpu_adam.py, which takes no CUDA headers",
    ),
    Op(
        name="cpu_lion",
        key=(ZERO, "offload_optimizer"),
        tools=ON_HOST,
        instead="remove zero_optimization.offload_optimizer",
        builds=lambda f: _is_offloaded(f) and _kind(f) == "lion",
        source=f"{ENGINE}; ops/op_builder/cpu/cpu_lion.py",
    ),
    Op(
        name="cpu_adagrad",
        key=(ZERO, "offload_optimizer"),
        tools=ON_HOST,
        instead="remove zero_optimization.offload_optimizer",
        builds=lambda f: _is_offloaded(f) and _kind(f) == "adagrad",
        source=f"{ENGINE}; ops/op_builder/cpu/cpu_adagrad.py",
    ),
    *(
        Op(
            name="quantizer",
            key=(ZERO, key),
            tools=ON_DEVICE,
            instead=f"set {key} to false",
            builds=lambda f, key=key: f.accelerator.name == "cuda" and bool(f.zero(key)),  # type: ignore[misc]
            source="deepspeed 0.19.8 runtime/zero/partition_parameters.py CUDAQuantizer; ops/op_builder/quantizer.py",
        )
        for key in QUANTIZED
    ),
    Op(
        name="async_io",
        key=(ZERO, "offload_optimizer", "device"),
        tools=(CXX, NINJA, LIBAIO),
        instead="use device cpu",
        builds=lambda f: _on_nvme(f) and f.accelerator.name == "cpu",
        source=SWAPPER,
    ),
    Op(
        name="async_io",
        key=(ZERO, "offload_optimizer", "device"),
        tools=(NVCC, CXX, NINJA, LIBAIO),  # it is linked with the CUDA toolkit's libraries
        instead="use device cpu",
        builds=lambda f: _on_nvme(f) and f.accelerator.name == "cuda",
        source=SWAPPER,
    ),
)


def ops_of(facts: Facts) -> list[Op]:
    """The extensions that a configuration has DeepSpeed build."""
    return [op for op in OPS if op.builds(facts)]
