"""What DeepSpeed compiles at the first use for a configuration, and what that takes: one table, a row an extension.

A row says for which configurations an extension is built, and the tools that building it takes. DeepSpeed builds at run
time unless its package was installed with the extension built in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from determined_ds.config.ds_schema import ZERO
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.rules import compiles_optimizer, optimizer
from determined_ds.config.strategy import QUANTIZED
from determined_ds.documents.document import KeyPath

NVCC, CXX, NINJA, LIBAIO = "nvcc", "c++", "ninja", "libaio"
OPTIMIZER = ("optimizer", "type")
USE_TORCHS = "set optimizer.params.torch_adam to true, which takes torch's own AdamW"


@dataclass(frozen=True, kw_only=True)
class Extension:
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
    builds: Callable[[ResolvedConfig], bool]
    source: str


ENGINE = "deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer; ops/op_builder/"
SWAPPER = "deepspeed 0.19.8 runtime/swap_tensor/*_swapper.py; ops/op_builder/async_io.py"
QUANTIZER = "deepspeed 0.19.8 runtime/zero/partition_parameters.py CUDAQuantizer; ops/op_builder/quantizer.py"
ON_HOST = (CXX, NINJA)
ON_DEVICE = (NVCC, CXX, NINJA)
ADAM = ("adam", "adamw")
OFFLOAD = (ZERO, "offload_optimizer")
OTHER_ADAM = "use AdamW with torch_adam: true"


def _on_device(name: str, kinds: tuple[str, ...], instead: str) -> Extension:
    """An optimizer of DeepSpeed's that nvcc builds."""
    return Extension(
        name=name,
        key=OPTIMIZER,
        tools=ON_DEVICE,
        instead=instead,
        builds=lambda c: compiles_optimizer(c.strategy, c) and optimizer(c) in kinds,
        source=f"{ENGINE}{name}.py",
    )


def _offloaded(name: str, kinds: tuple[str, ...]) -> Extension:
    """An optimizer of DeepSpeed's for states in host memory."""
    return Extension(
        name=name,
        key=OFFLOAD,
        tools=ON_HOST,
        instead="remove zero_optimization.offload_optimizer",
        builds=lambda c: (
            c.strategy.offload_optimizer is not None
            and optimizer(c) in kinds
            and not (kinds == ADAM and _uses_torch_adam(c))
        ),
        source=f"{ENGINE}cpu/{name.removeprefix('cpu_')}.py",
    )


def _async_io(accelerator: str, tools: tuple[str, ...]) -> Extension:
    return Extension(
        name="async_io",
        key=(*OFFLOAD, "device"),
        tools=tools,
        instead="use device cpu",
        builds=lambda c: (
            "nvme" in (c.strategy.offload_optimizer, c.strategy.offload_param)
            and c.accelerator.name == accelerator
        ),
        source=SWAPPER,
    )


def _quantizer(key: str) -> Extension:
    return Extension(
        name="quantizer",
        key=(ZERO, key),
        tools=ON_DEVICE,
        instead=f"set {key} to false",
        builds=lambda c: c.accelerator.name == "cuda" and bool(c.ds.get((ZERO, key))),
        source=QUANTIZER,
    )


def _uses_torch_adam(c: ResolvedConfig) -> bool:
    return bool(c.ds.get(("optimizer", "params", "torch_adam")))


OPS = (
    _on_device("fused_adam", ADAM, USE_TORCHS),
    _on_device("fused_lamb", ("lamb",), OTHER_ADAM),
    _on_device("fused_lion", ("lion",), OTHER_ADAM),
    Extension(
        name="fused_adam",  # that of the CPU accelerator
        key=OPTIMIZER,
        tools=ON_HOST,
        instead=USE_TORCHS,
        builds=lambda c: (
            c.accelerator.name == "cpu"
            and optimizer(c) in ADAM
            and c.strategy.offload_optimizer is None
            and not _uses_torch_adam(c)
        ),
        source=f"{ENGINE}cpu/fused_adam.py",
    ),
    _offloaded("cpu_adam", ADAM),  # takes no CUDA headers
    _offloaded("cpu_lion", ("lion",)),
    _offloaded("cpu_adagrad", ("adagrad",)),
    *map(_quantizer, QUANTIZED),
    _async_io("cpu", (CXX, NINJA, LIBAIO)),
    _async_io("cuda", (NVCC, CXX, NINJA, LIBAIO)),  # it is linked with the CUDA toolkit's libraries
)


def ops_of(resolved: ResolvedConfig) -> list[Extension]:
    """The extensions that a configuration has DeepSpeed build."""
    return [op for op in OPS if op.builds(resolved)]
