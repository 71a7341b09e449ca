"""Where a trial computes, and on how much at a time: devices, slots = pipe x model x sequence x data, batch sizes.

DeepSpeed and Determined both round down where batch sizes do not divide (``_set_batch_related_parameters`` in deepspeed
0.19.8's ``runtime/config.py``; ``calculate_batch_sizes`` in determined 0.38.1's ``util.py``). They are never rounded
here; one that does not divide is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.config.params import AUTO, PARALLEL_SIZES, TOTAL
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
    """The parallel degrees, whose product is the number of slots."""

    pipe_parallel_size: int  # pipeline stages; 1: no pipeline
    model_parallel_size: int  # ranks that share one layer (tensor parallel)
    data_parallel_world_size: int  # replicas: groups of ranks that share a micro-batch
    sequence_parallel_size: int = 1  # ranks that share a sequence, each with a slice of its tokens (Ulysses)
    # Ranks are counted through the stages of one replica before the next, so that neighbours in a pipeline are
    # neighbours on a machine; else through the replicas of one stage before the next.
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


def topology_problem(
    layout: Topology, slots: int, replicas: int | None, hyperparameters: Document, slots_origin: str
) -> Problem | None:
    """Why ``slots`` are not pipe x model x sequence x data, with ``replicas`` if stated; None where they are."""
    found, rest = divmod(slots, layout.per_replica)
    if not rest and replicas in (None, found):
        return None
    sizes = {name: getattr(layout, name) for name in PARALLEL_SIZES}
    stated = {(name,): hyperparameters.get((name,)) is not None for name in sizes}
    origins = [hyperparameters.origin(path) if stated[path] else "" for path in stated]
    factors = " x ".join(map(_with_origin, sizes, sizes.values(), origins))
    if not rest:
        message = f"{_with_origin('slots_per_trial', slots, slots_origin)} / ({factors}) = {found}"
        fix = f"write {found} or auto, or use {(replicas or 1) * layout.per_replica} slots"
        return hyperparameters.problem((REPLICAS,), message, fix, "topology")
    message = f"{factors} = {layout.per_replica} slots a replica, which does not divide {slots} slots"
    fix = f"use {_nearest(slots, layout.per_replica)} slots"
    fix += "".join(f", or another {name}" for name, size in sizes.items() if size > 1)
    key = "slots_per_trial"
    return Problem(key=key, value=slots, origin=slots_origin, message=message, fix=fix, code="topology")


def _with_origin(name: str, size: int, origin: str) -> str:
    return f"{name} {size} ({origin})" if origin else f"{name} {size}"


def _nearest(number: int, factor: int) -> str:
    """The multiples of a factor on either side of a number that is none."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


# ------------------------------------------------------------------------------------------- batch sizes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The four numbers of a batch; the first is the product of the others."""

    global_batch_size: int  # samples of an optimizer step, all replicas: DeepSpeed's train_batch_size
    micro_batch_size: int  # samples of a forward pass of a replica: train_micro_batch_size_per_gpu
    accumulation: int  # micro-batches of a step of a replica: gradient_accumulation_steps
    replicas: int  # data-parallel copies: data_parallel_world_size

    def __post_init__(self) -> None:
        assert min(self.global_batch_size, self.micro_batch_size, self.accumulation, self.replicas) >= 1, self
        assert self.global_batch_size == self.micro_batch_size * self.accumulation * self.replicas, self


def stated_batch(own: int | None, hyperparameters: Document, ds: Document, topology: Topology) -> Batch:
    """The batch that hyperparameters (``own`` is their ``global_batch_size``) and the DeepSpeed JSON state, completed.

    An accumulation that is not stated is 1 where something else is left to derive, as in DeepSpeed. A ConfigError says
    that they state too little, the total twice, or numbers that do not divide.
    """
    _, of_micro, of_steps = BATCH_KEYS
    stated = (ds.get((key,)) for key in BATCH_KEYS)
    total, micro, steps = (None if number == AUTO else number for number in stated)
    path, document = ("train_batch_size",), ds
    if own is not None:
        if total not in (None, own):
            message = f"differs from train_batch_size = {total} ({ds.origin(path)})"
            fix = 'state it once: write "auto" for train_batch_size, and global_batch_size is used'
            raise ConfigError(hyperparameters.problem((TOTAL,), message, fix, "batch-twice"))
        total, path, document = own, (TOTAL,), hyperparameters
    replicas = topology.data_parallel_world_size
    if total is None and micro is None:
        missing = f"{TOTAL}, {of_micro}" + ("" if steps else f", {of_steps}")
        message = f"the batch is not determined: {missing} are missing"
        fix = "state global_batch_size in the hyperparameters; the rest is derived from it and the slots"
        key = f"hyperparameters.{TOTAL}"
        raise ConfigError(Problem(key=key, message=message, fix=fix, code="batch-missing"))
    product = (micro or 1) * (steps or 1) * replicas
    is_derived = None in (total, micro, steps)
    total = product if total is None else total
    if total % product if is_derived else total != product:
        given = [
            (key, number) for key, number in ((of_micro, micro), (of_steps, steps)) if number is not None
        ]
        factors = [_with_origin(key, number, ds.origin((key,))) for key, number in given]
        factors.append(_with_origin(REPLICAS, replicas, f"{topology.slots} slots"))
        equals = f" = {product}" if given else ""
        message = f"is not {'a multiple of ' if is_derived else ''}{' x '.join(factors)}{equals}"
        fix = f"use {path[0]} {_nearest(total, product) if is_derived else product}"
        raise ConfigError(document.problem(path, message, fix, "batch"))
    left = total // product
    micro, steps = micro or left, steps or (left if micro else 1)
    return Batch(global_batch_size=total, micro_batch_size=micro, accumulation=steps, replicas=replicas)
