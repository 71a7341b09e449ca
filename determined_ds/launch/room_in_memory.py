"""Whether a machine has the memory for what a checkpoint holds, under the strategy that is to read it.

1. The index of the checkpoint says how many parameters there are, and which are trained.
2. The strategy of the run says what a rank holds of their states.
3. More than a GPU has, or than the machine has for all its ranks, is refused before anything is loaded.

Activations come on top: ``det-ds check --memory`` and ``--gpu-memory`` count them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from determined_ds.checkpoints.index import BUFFER, TRAINED, EngineIndex, read_index
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import CheckpointError, Problem
from determined_ds.memory.fitting import alternatives
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import model_states
from determined_ds.memory.units import format_bytes

ASK = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]


def shapes_in(path: Path) -> list[ModelShape]:
    """The sizes of each engine's model in a checkpoint; none where it has no index."""
    try:
        found = [read_index(folder) for folder in sorted(path.glob("model[0-9]*"))]
    except CheckpointError:
        return []  # what is wrong with it is said where it is read
    return [_shape(index) for index in found if index is not None and index.tensors]


def _shape(index: EngineIndex) -> ModelShape:
    parameters = [tensor for tensor in index.tensors.values() if tensor.kind != BUFFER]
    trained = sum(tensor.count for tensor in parameters if tensor.kind == TRAINED)
    return ModelShape(
        num_parameters=sum(tensor.count for tensor in parameters), num_trainable_parameters=trained
    )


def no_room(
    path: Path, resolved: ResolvedConfig, accelerator: Accelerator, *, gpu_bytes: int | None, host_bytes: int
) -> Iterator[Problem]:
    """The problem of a strategy whose ranks cannot hold a checkpoint's states.

    Args:
        path: The checkpoint's folder.
        resolved: What is to read it.
        accelerator: What the ranks compute on.
        gpu_bytes: Memory of the smallest GPU; None where it is unknown.
        host_bytes: Memory of this machine.
    """
    shapes, strategy = shapes_in(path), resolved.strategy
    states = [model_states(shape, strategy) for shape in shapes]
    ranks = max(1, resolved.topology.slots // max(1, resolved.machines))
    on_device, on_host = (
        sum(each.model_states_bytes for each in states),
        sum(each.host_bytes for each in states),
    )
    if accelerator.name == "cpu":
        on_device, on_host = 0, on_device + on_host
    if gpu_bytes is not None and on_device > gpu_bytes:
        others = (replace(other, micro_batch_size=1) for other in alternatives(strategy))
        fitting = next(
            (
                other.name
                for other in others
                if sum(model_states(shape, other).model_states_bytes for shape in shapes) <= gpu_bytes
            ),
            None,
        )
        fix = f"use {fitting}" if fitting else "use more slots, or GPUs with more memory"
        yield _problem(strategy.name, f"{format_bytes(on_device)} a rank", gpu_bytes, "a GPU", fix)
    if on_host * ranks > host_bytes:
        need = f"{format_bytes(on_host)} a rank on the host, and {ranks} ranks share it"
        fix = "use fewer slots on a machine, or a strategy that divides the states among more replicas"
        yield _problem(strategy.name, need, host_bytes, "this machine", fix)


def _problem(strategy: str, need: str, memory: int, place: str, fix: str) -> Problem:
    message = (
        f"the checkpoint's parameters, their gradients and optimizer states take {need}; {place} has "
        f"{format_bytes(memory)}"
    )
    return Problem(key="strategy", value=strategy, message=message, fix=fix, code="memory")


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None where ``nvidia-smi`` does not say."""
    try:
        said = subprocess.run(ASK, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_memory_bytes() -> int:
    """Memory of this machine, its swap included."""
    import psutil

    return int(psutil.virtual_memory().total + psutil.swap_memory().total)
