"""The memory of ranks: what GPUs hold, what a rank has held, its model states, and what the memory model expects."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_of_stages, memory_per_rank
from determined_ds.memory.units import GIB, MIB

# ------------------------------------------------------------------------------------------- GPUs


@dataclass(frozen=True, kw_only=True)
class GpuMemoryStats:
    """Memory of one GPU, in bytes.

    Args:
        device: Its index, from 0.
        name: Of the model.
        allocated_bytes: In tensors of this process.
        peak_allocated_bytes: The most in tensors of this process since its start, or since
            ``torch.cuda.reset_peak_memory_stats``.
        reserved_bytes: Held by this process's allocator, in tensors or not.
        free_bytes: Held by no process.
        total_bytes: Of the device.
    """

    device: int
    name: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def get_gpu_memory_stats(device: int | str | torch.device | None = None) -> list[GpuMemoryStats]:
    """The memory of every GPU that this process sees, or of one; an empty list without one.

    Asking CUDA for free memory creates a context of hundreds of megabytes on the GPU, so ``nvidia-smi`` is asked. For a
    GPU that it does not list (ROCm, a part of one by MIG), CUDA is asked if this process computes on it already; else
    it is left out.

    Args:
        device: One alone: its index, a name as ``"cuda:1"``, or a ``torch.device``; None: all of them.

    Returns:
        One entry a GPU, in the order of their indices.

    Raises:
        ConfigError: this process sees no such GPU.

    Source: ``torch.cuda.memory_allocated``, ``memory_reserved`` and ``mem_get_info``.
    """
    cuda, count = torch.cuda, torch.cuda.device_count()
    wanted = list(range(count))
    if device is not None:
        given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if given.type != "cuda" or not count or (given.index or 0) >= count:
            message = f"this process sees {count or 'no'} GPU{'s' * (count > 1)}, and not this one"
            fix = "leave device out: all that are seen are listed"
            raise ConfigError(
                Problem(key="device", value=str(device), message=message, fix=fix, code="device")
            )
        wanted = [cuda.current_device() if given.index is None else given.index]
    driver: dict[str, list[int]] = {}
    if wanted:
        ask = ["nvidia-smi", "--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            said = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
            for uuid, *mib in (line.split(", ") for line in said.splitlines()):
                driver[uuid] = [int(each) * MIB for each in mib]
    found = []
    for index in wanted:
        free_and_total = driver.get(f"GPU-{getattr(cuda.get_device_properties(index), 'uuid', None)}")
        if free_and_total is None:
            if index != cuda.current_device() and not cuda.memory_reserved(index):
                continue
            free_and_total = list(cuda.mem_get_info(index))
        found.append(
            GpuMemoryStats(
                device=index,
                name=cuda.get_device_name(index),
                allocated_bytes=cuda.memory_allocated(index),
                peak_allocated_bytes=cuda.max_memory_allocated(index),
                reserved_bytes=cuda.memory_reserved(index),
                free_bytes=free_and_total[0],
                total_bytes=free_and_total[1],
            )
        )
    return found


# ------------------------------------------------------------------------------------------- a rank


def peak_bytes(device: torch.device) -> int:
    """The most that this rank has held: in tensors on its GPU; on a CPU, resident memory of its process.

    Args:
        device: What it computes on.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(int(psutil.Process().memory_info().rss), peak if sys.platform == "darwin" else peak * 1024)


def memory_metrics(peaks: Sequence[int]) -> dict[str, float]:
    """The metrics, of the ranks with most and least: numbers and no lists, which the web UI does not draw.

    Args:
        peaks: Of each rank, in bytes; at least one.
    """
    return {"peak_memory_gib": max(peaks) / GIB, "peak_memory_gib_min": min(peaks) / GIB}


# ------------------------------------------------------------------------------------------- model states


def walk(engine: Any) -> dict[str, int]:
    """Bytes of this rank by kind: ``parameters``, ``gradients`` and ``optimizer_states``.

    Every storage counts once: a parameter does not count as an optimizer state. Gradients exist only between a backward
    pass and the optimizer's step, see :func:`watch`.

    Args:
        engine: DeepSpeed's, at any ZeRO stage, or one with its ``module`` and ``optimizer``.
    """
    found = dict.fromkeys(KINDS, 0)
    seen: set[int] = set()
    for kind, tensors in KINDS.items():
        for tensor in tensors(engine):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                found[kind] += int(storage.nbytes())
    return found


def watch(engine: Any, found: Callable[[dict[str, int]], None]) -> Callable[[], None]:
    """Walk an engine as each optimizer step begins, when parameters, gradients and states all exist.

    ZeRO 1 has whole gradients only until then, so below stage 2 the engine is also walked as each backward pass ends.
    From stage 2 on, those are in the communication bucket, which is not a model state.

    Args:
        engine: As for :func:`walk`.
        found: Called with the result of each walk.

    Returns:
        Call it to stop watching.
    """

    def look(*_: Any) -> None:
        found(walk(engine))

    handles = [base_optimizer(engine).register_step_pre_hook(look)]
    # The backward pass comes to the first layer last.
    first = next((parameter for parameter in engine.module.parameters() if parameter.requires_grad), None)
    if first is not None and engine.zero_optimization_stage() < 2:
        handles.append(first.register_post_accumulate_grad_hook(look))

    def let_go() -> None:
        for handle in handles:
            handle.remove()

    return let_go


def base_optimizer(engine: Any) -> Any:
    """torch's own optimizer, inside the one that DeepSpeed wraps around it."""
    return getattr(engine.optimizer, "optimizer", None) or engine.optimizer


def _parameters(engine: Any) -> Iterator[Any]:
    for parameter in engine.module.parameters():
        yield getattr(parameter, "ds_tensor", parameter.data)


def _gradients(engine: Any) -> Iterator[Any]:
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        yield from (g for g in (parameter.grad, getattr(parameter, "grad_accum", None)) if g is not None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(zero, name, {}).values():
            yield from group or ()
    yield from getattr(zero, "fp32_groups_gradients_flat", ())
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    yield from () if flat is None else (flat,)


def _optimizer_states(engine: Any) -> Iterator[Any]:
    base = base_optimizer(engine)
    for group in base.param_groups:
        yield from group["params"]
    # ZeRO 3 hides them between steps.
    yield from getattr(engine.optimizer, "fp32_partitioned_groups_flat", ())
    for state in base.state.values():
        yield from (value for value in state.values() if hasattr(value, "untyped_storage") and value.ndim)


KINDS = {"parameters": _parameters, "gradients": _gradients, "optimizer_states": _optimizer_states}


# ------------------------------------------------------------------------------------------- what is expected


def elements(parameter: Any) -> int:
    """Of a parameter as a whole, also where ZeRO 3 keeps only this rank's part of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def shape_of_built(model: Any, config: Any, *, sequence_length: int, **known: Any) -> ModelShape:
    """The shape of a model that is built, counted in its modules and read in its configuration.

    Args:
        model: A ``torch.nn.Module``, on any device.
        config: Of a Hugging Face model, or an object with sizes by the same names, or None.
        sequence_length: Tokens of a sample; 0 where samples have none.
        known: Other fields of the shape.
    """
    parameters = list(model.parameters())

    def size(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), 0)

    owned = (sum(map(elements, module.parameters(recurse=False))) for module in model.modules())
    return ModelShape(
        num_parameters=max(1, sum(map(elements, parameters))),
        num_trainable_parameters=sum(elements(p) for p in parameters if p.requires_grad),
        num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_heads=size("num_attention_heads", "n_head", "num_heads"),
        vocab_size=size("vocab_size"),
        sequence_length=sequence_length,
        largest_layer_parameters=max(owned, default=0),
        num_expert_parameters=sum(
            elements(each) for name, each in model.named_parameters() if ".experts." in name
        ),
        **known,
    )


def record_estimate(trial: Any, context: Any) -> None:
    """Write ``memory.json`` of the run directory; a collective. Not on a cluster, which has none.

    The engines are counted as they are, in a moment; activations go by the sizes of a transformer where its
    configuration states them, since measuring them, as ``det-ds check --memory`` does, takes seconds.

    Args:
        trial: Its ``tokens_per_sample``, where it has one, is the length of a sequence.
        context: Its context, with one engine or several.
    """
    from determined_ds.checkpoints.engine_slices import place_of  # count with this module
    from determined_ds.train.local_core import LocalTrainContext

    if not isinstance(context._core.train, LocalTrainContext):
        return
    tokens, own = getattr(trial, "tokens_per_sample", lambda: None)(), []
    for engine in context.models:  # what this rank has of each: all of it, or its pipeline stage
        module = engine.module
        config = getattr(getattr(module, "module", module), "config", None)
        shape = shape_of_built(module, config, sequence_length=int(tokens or 0))
        # Under tensor and expert parallel several may be parts of one parameter.
        wholes = {place_of(each, name)[0]: each for name, each in module.named_parameters()}
        counts = {name: math.prod(place_of(each, name)[1]) for name, each in wholes.items()}
        if sum(counts.values()) > shape.num_parameters:
            shape = replace(
                shape,
                num_parameters=sum(counts.values()),
                num_trainable_parameters=sum(
                    counts[name] for name, each in wholes.items() if each.requires_grad
                ),
                num_expert_parameters=sum(count for name, count in counts.items() if ".experts." in name),
            )
        own.append((getattr(engine, "stage_id", 0), shape))
    ranks = context.distributed.allgather(own)
    if context.distributed.rank == 0:
        with contextlib.suppress(Exception):  # it is for people to look at, and ends no training
            _write(context, [_whole(parts) for parts in zip(*ranks, strict=True)])


def _whole(parts: Sequence[tuple[int, ModelShape]]) -> ModelShape:
    """The shape of a model whose stages are on several ranks."""
    stages = dict(parts)
    first = stages[min(stages)]
    if len(stages) == 1:
        return first
    counts = tuple(stages[stage].num_parameters for stage in sorted(stages))
    return ModelShape(
        num_parameters=sum(counts),
        num_trainable_parameters=sum(each.trainable for each in stages.values()),
        stage_parameters=counts,
        largest_layer_parameters=max(each.largest_layer_parameters for each in stages.values()),
    )


def _write(context: Any, shapes: list[ModelShape]) -> None:
    strategy = context.resolved.strategy
    found = [memory_per_rank(shape, strategy) for shape in shapes]
    content = {
        "total_bytes": sum(each.total_bytes for each in found),
        "model_states_bytes": sum(each.model_states_bytes for each in found),
        "host_bytes": sum(each.host_bytes for each in found),
        "has_activations": all(shape.knows_activations for shape in shapes),
        "engines": [
            {
                "parameters": shape.num_parameters,
                **asdict(each),
                "stages": [asdict(stage) for stage in memory_of_stages(shape, strategy)],
            }
            for shape, each in zip(shapes, found, strict=True)
        ],
    }
    write_whole(context._run_dir.memory, json.dumps(content, indent=2) + "\n")
