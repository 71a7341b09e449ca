"""Where a trial computes, and on how much at a time: devices, slots = pipe x model x sequence x data, batch sizes.

DeepSpeed and Determined both round down where batch sizes do not divide (``_set_batch_related_parameters`` in deepspeed
0.19.8's ``runtime/config.py``; ``calculate_batch_sizes`` in determined 0.38.1's ``util.py``). They are never rounded
here; one that does not divide is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from determined_ds.config.params import AUTO, TOTAL
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem

RANKS_PER_CPU_CORE = 4
# Key of the DeepSpeed JSON -> its name here.
BATCH_KEYS = {
    "train_batch_size": TOTAL,
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation",
}
REPLICAS = "data_parallel_world_size"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device and how many of it there are. Detecting it is not done here.

    Args:
        name: ``cpu`` or ``cuda``, DeepSpeed's own names.
        num_devices: GPUs, or CPU cores.
        bf16: Whether ``bf16.enabled: "auto"`` is on. False for a CPU even where it has bf16 instructions:
            a run without a GPU serves for comparison, so it stays in fp32 unless bf16 is stated.
        fp16: Whether fp16 can be trained in at all.
    """

    name: str
    num_devices: int
    bf16: bool
    fp16: bool

    @property
    def max_ranks(self) -> int:
        """Ranks that one machine of these devices carries: one a GPU, four a CPU core."""
        return self.num_devices if self.name == "cuda" else self.num_devices * RANKS_PER_CPU_CORE


def assumed_cuda(slots: int) -> Accelerator:
    """A cluster's GPUs, one a slot, of a kind that computes in bf16."""
    return Accelerator(name="cuda", num_devices=slots, bf16=True, fp16=True)


# ------------------------------------------------------------------------------------------- slots


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parallel degrees, whose product is the number of slots.

    Args:
        pipe_parallel_size: Pipeline stages (1: no pipeline).
        model_parallel_size: Ranks that share one layer (tensor parallel).
        data_parallel_world_size: Replicas: groups of ranks that share a micro-batch.
        sequence_parallel_size: Ranks that share a sequence, each with a slice of its tokens (Ulysses).
        pipe_within_machine: Ranks are counted through the stages of one replica before the next, so that neighbours
            in a pipeline are neighbours on a machine; else through the replicas of one stage before the next.
    """

    pipe_parallel_size: int
    model_parallel_size: int
    data_parallel_world_size: int
    sequence_parallel_size: int = 1
    pipe_within_machine: bool = False

    @property
    def per_replica(self) -> int:
        """Ranks that share a micro-batch."""
        return self.pipe_parallel_size * self.model_parallel_size * self.sequence_parallel_size

    @property
    def slots(self) -> int:
        """Ranks in all; a slot is Determined's device, and each carries one rank."""
        return self.per_replica * self.data_parallel_world_size

    @property
    def axes(self) -> dict[str, int]:
        """Name of each axis -> its size; ranks count through the last one first.

        Ranks that share a layer or a sequence wait for each other several times a layer, and are always neighbours.

        Source: deepspeed 0.19.8 runtime/pipe/topology.py PipeDataParallelTopology; utils/groups.py.
        """
        pipe, data = ("pipe", self.pipe_parallel_size), ("data", self.data_parallel_world_size)
        outer = (data, pipe) if self.pipe_within_machine else (pipe, data)
        return dict([*outer, ("sequence", self.sequence_parallel_size), ("model", self.model_parallel_size)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank, counted from 0 machine by machine, stands: name of each axis -> index on it."""
        found = {}
        for name, size in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}


def topology_problem(
    slots: int, sizes: Mapping[str, int], replicas: int | None, origins: Mapping[str, str]
) -> Problem | None:
    """Why ``slots`` are not pipe x model x sequence x data, with the sizes nearby that would do; None where they are.

    ``sizes`` and ``origins`` are by the names in a configuration; ``replicas`` is the stated number, if any.
    """
    per_replica = math.prod(sizes.values())
    layout = " x ".join(_with_origin(name, size, origins) for name, size in sizes.items())
    found, rest = divmod(slots, per_replica)
    if not rest and replicas in (None, found):
        return None
    if rest:
        name, key, value = "slots_per_trial", "slots_per_trial", slots
        message = f"{layout} = {per_replica} slots a replica, which does not divide {slots} slots"
        below = f"{found * per_replica} or " if found else ""
        fix = f"use {below}{(found + 1) * per_replica} slots"
        for degree, size in sizes.items():
            left, rest = divmod(slots, per_replica // size)
            if size > 1 and rest == 0 and left < 10**5:  # more are a mistake of another kind
                fits = [each for each in range(1, left + 1) if left % each == 0]
                fix += f", or {degree} {min(fits, key=lambda each: (abs(each - size), each))}"
    else:
        assert replicas is not None
        name, key, value = REPLICAS, f"hyperparameters.{REPLICAS}", replicas
        message = f"{_with_origin('slots_per_trial', slots, origins)} / ({layout}) = {found}"
        fix = f"write {found} or auto, or use {replicas * per_replica} slots"
    return Problem(
        key=key, value=value, origin=origins.get(name, ""), message=message, fix=fix, code="topology"
    )


def whole_sequences(name: str, size: int) -> Problem:
    """The problem of a trial of that name that computes on whole sequences, where ``size`` ranks are to share them."""
    key, message = "hyperparameters.sequence_parallel_size", f"{name} computes on whole sequences"
    fix = "set it to 1; or write the trial for slices, and say so by sequence_parallel = True"
    return Problem(key=key, value=size, message=message, fix=fix, code="sequence-trial")


def _with_origin(name: str, size: int, origins: Mapping[str, str]) -> str:
    return f"{name} {size}" + (f" ({origins[name]})" if origins.get(name) else "")


# ------------------------------------------------------------------------------------------- batch sizes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The four numbers of a batch; the first is the product of the others.

    Args:
        global_batch_size: Samples per optimizer step over all replicas (DeepSpeed's ``train_batch_size``).
        micro_batch_size: Samples per forward pass of a replica (``train_micro_batch_size_per_gpu``).
        accumulation: Micro-batches per optimizer step of a replica (``gradient_accumulation_steps``);
            in a pipeline, its ``micro_batches``.
        replicas: Data-parallel copies (``data_parallel_world_size``).
    """

    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    replicas: int

    def __post_init__(self) -> None:
        assert min(self.global_batch_size, self.micro_batch_size, self.accumulation, self.replicas) >= 1, self
        assert self.global_batch_size == self.micro_batch_size * self.accumulation * self.replicas, self


def stated_batch(own: int | None, hyperparameters: Document, ds: Document, topology: Topology) -> Batch:
    """The batch that hyperparameters (``own`` is their ``global_batch_size``) and the DeepSpeed JSON state, completed.

    An accumulation that is not stated is 1 where something else is left to derive, as in DeepSpeed.

    Raises:
        ConfigError: they state too little, the total twice, or numbers that do not divide; the fix names the nearest
            totals that would do.
    """
    stated: dict[str, int] = {}
    origins = {REPLICAS: f"{topology.slots} slots"}
    for key in BATCH_KEYS:
        if ds.get((key,)) not in (None, AUTO):
            stated[key], origins[key] = ds.get((key,)), ds.origin((key,))
    total, micro, steps = (stated.get(key) for key in BATCH_KEYS)
    _, of_micro, of_steps = BATCH_KEYS
    name, document = "train_batch_size", ds
    if own is not None:
        if total not in (None, own):
            message = f"differs from train_batch_size = {total} ({origins['train_batch_size']})"
            fix = 'state it once: write "auto" for train_batch_size, and global_batch_size is used'
            raise ConfigError(hyperparameters.problem((TOTAL,), message, fix, "batch-twice"))
        total, name, document = own, TOTAL, hyperparameters
    replicas = topology.data_parallel_world_size
    product = (micro or 1) * (steps or 1) * replicas
    if total is None and micro is None:
        absent = [TOTAL, of_micro, *([] if steps else [of_steps])]
        message = f"the batch is not determined: {', '.join(absent)} are missing"
        fix = "state global_batch_size in the hyperparameters; the rest is derived from it and the slots"
        raise ConfigError(
            Problem(key=f"hyperparameters.{TOTAL}", message=message, fix=fix, code="batch-missing")
        )
    is_derived = total is None or micro is None or steps is None
    total = product if total is None else total
    if total == product or (is_derived and total % product == 0):
        left = total // product
        micro, steps = micro or left, steps or (left if micro else 1)
        return Batch(global_batch_size=total, micro_batch_size=micro, accumulation=steps, replicas=replicas)
    factors = {of_micro: micro, of_steps: steps, REPLICAS: replicas}
    given = {factor: number for factor, number in factors.items() if number is not None}
    words = " x ".join(_with_origin(factor, number, origins) for factor, number in given.items())
    below, above = total // product * product, (total // product + 1) * product
    near = f"{below} or {above}" if below else f"{above}"
    fix = f"use {name} {near if is_derived else product}"
    equals = f" = {product}" if len(given) > 1 else ""
    message = f"is not {'a multiple of ' if is_derived else ''}{words}{equals}"
    raise ConfigError(document.problem((name,), message, fix, "batch"))
