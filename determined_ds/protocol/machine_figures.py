"""What ``det-ds bench`` measures, figure by figure. Loads no torch.

Bytes of a collective are counted as nccl-tests counts them, of the whole: the tensor of an all-reduce, a broadcast or a
send, the output of an all-gather, the input of a reduce-scatter or of an all-to-all. A bus bandwidth is the bytes per
second times :func:`bus_factor`, which makes it comparable between numbers of ranks.

Source: ``doc/PERFORMANCE.md`` of NVIDIA's nccl-tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from determined_ds.protocol.strict_json import Integer, Real, one_of

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
SEND_RECV, BROADCAST, ALL_TO_ALL = "send_recv", "broadcast", "all_to_all"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, SEND_RECV, BROADCAST, ALL_TO_ALL)
KINDS = COMMUNICATION, MEMORY, TRAINING, CHECKPOINT = "communication", "memory", "training", "checkpoint"
# Of a bandwidth: the memory that a rank computes in; between it and the host's, where they differ; the host's.
PLACES = DEVICE, TO_DEVICE, FROM_DEVICE, HOST = "device", "to device", "from device", "host"

Count = Annotated[Integer, Field(ge=1)]
Bytes = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Real, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[Real, Field(ge=0, allow_inf_nan=False)]
KNOWN_KEYS = ConfigDict(extra="forbid")


def bus_factor(name: str, ranks: int) -> float:
    """Bytes that pass each rank's link, over the bytes of the whole."""
    if ranks < 2 or name in (SEND_RECV, BROADCAST):
        return 1.0
    return (2 if name == ALL_REDUCE else 1) * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What figures are of.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        device: The name of the GPU, or of the processor.
        num_devices: GPUs, or CPU cores.
        cores: CPU cores.
        host_memory_bytes: Of the machine.
        device_memory_bytes: Of a GPU; None on a CPU, and where it is unknown.
    """

    __pydantic_config__ = KNOWN_KEYS

    accelerator: Annotated[str, one_of(("cpu", "cuda"))]
    device: str
    num_devices: Count
    cores: Count
    host_memory_bytes: Bytes
    device_memory_bytes: Bytes | None = None

    @property
    def identity(self) -> str:
        """What decides whether figures hold: the device; on a CPU the number of cores, which ranks divide, too."""
        return self.device if self.accelerator == "cuda" else f"{self.cores} x {self.device}"

    def __str__(self) -> str:
        if self.accelerator == "cuda":
            return f"{self.num_devices} x {self.device}, {_cores(self.cores)}"
        return f"{self.device}, {_cores(self.cores)}"


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """A measurement of a kind.

    Args:
        bench: One of :data:`KINDS`.
        when: Date and time, ISO 8601.
        command: As it was typed.
        hostname: BenchPlace.
        ranks: Processes that took part.
        versions: ``torch 2.13.0``, ``deepspeed 0.19.8``, ...
        wall_seconds: What it took.
        notes: What could not be measured, or not as it was asked.
    """

    __pydantic_config__ = KNOWN_KEYS

    bench: Annotated[str, one_of(KINDS)]
    when: str
    command: str
    hostname: str
    ranks: Count
    versions: tuple[str, ...]
    wall_seconds: NotNegative
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later figure has, that takes the place of this one."""
        return (self.bench,)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective at one size: seconds of a call, the slowest rank's.

    Args:
        size_bytes: Of the whole.
        seconds: Median of the calls.
        fast_seconds: Their lower quartile.
        slow_seconds: Their upper quartile.
        deepspeed_seconds: What DeepSpeed's communication log says of the same call, in the same run; None where it
            has none.
        deepspeed_bus_bytes_per_s: The same of its bus bandwidth, by DeepSpeed's own formula.
    """

    __pydantic_config__ = KNOWN_KEYS

    size_bytes: Count
    seconds: Positive
    fast_seconds: Positive
    slow_seconds: Positive
    deepspeed_seconds: Positive | None = None
    deepspeed_bus_bytes_per_s: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective over some ranks: a call of ``size`` bytes takes about latency + size x factor / bus bandwidth.

    Args:
        name: One of :data:`COLLECTIVES`.
        ranks: That take part, >= 2.
        machines: On which they are.
        backend: ``gloo`` or ``nccl``.
        dtype: Of its elements, e.g. ``float32``.
        latency_s: Fitted.
        bus_bytes_per_s: Fitted.
        points: What was measured, by size.
    """

    __pydantic_config__ = KNOWN_KEYS

    name: Annotated[str, one_of(COLLECTIVES)]
    ranks: Annotated[Integer, Field(ge=2)]
    machines: Count
    backend: str
    dtype: str
    latency_s: NotNegative
    bus_bytes_per_s: Positive
    points: tuple[Transfer, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.name, self.ranks, self.machines, self.backend, self.dtype


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Floating-point operations per second of large matrix products.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``; ``tf32`` for fp32 in the shortened products of a GPU.
        ranks: Processes that computed at once on a machine.
        threads: Of each, on a CPU; 0 on a GPU.
        flops_per_s: Of one of them.
    """

    __pydantic_config__ = KNOWN_KEYS

    precision: Annotated[str, one_of(("fp32", "tf32", "bf16", "fp16"))]
    ranks: Count
    threads: Bytes
    flops_per_s: Positive

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.precision, self.ranks, self.threads


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes per second that one rank moves, read and written both counted where it copies within a memory.

    Args:
        place: One of :data:`PLACES`.
        ranks: Processes that did so at once on a machine.
        bytes_per_s: Of one of them.
    """

    __pydantic_config__ = KNOWN_KEYS

    place: Annotated[str, one_of(PLACES)]
    ranks: Count
    bytes_per_s: Positive

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.place, self.ranks


@dataclass(frozen=True, kw_only=True)
class HeldStates:
    """What a rank of a real engine held, beside the estimate.

    Args:
        model: Its name.
        num_parameters: Of the model.
        strategy: ``zero0`` ... ``zero3_offload``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        ranks: Replicas.
        state_bytes: Parameters, gradients and optimizer states; None where some are offloaded.
        estimated_state_bytes: Those on the device by the estimate.
        peak_bytes: The most that was allocated beside what was there before; None where it was not counted.
        estimated_peak_bytes: The same by the estimate; on a CPU with what is offloaded, which is in the same memory.
    """

    __pydantic_config__ = KNOWN_KEYS

    model: str
    num_parameters: Count
    strategy: str
    precision: str
    ranks: Count
    state_bytes: Bytes | None
    estimated_state_bytes: Bytes
    peak_bytes: Bytes | None = None
    estimated_peak_bytes: Bytes | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.model, self.strategy, self.precision, self.ranks

    @property
    def state_error(self) -> float | None:
        """By how much of what was held the estimate of the states is above it."""
        return self.estimated_state_bytes / self.state_bytes - 1 if self.state_bytes else None

    @property
    def peak_error(self) -> float | None:
        """The same at the most of a step."""
        if not self.peak_bytes or self.estimated_peak_bytes is None:
            return None
        return self.estimated_peak_bytes / self.peak_bytes - 1


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What a step of a model takes.

    Args:
        model: Its name.
        num_parameters: Of the model; None where they are unknown.
        strategy: ``zero0`` ...
        precision: ``fp32``, ``bf16`` or ``fp16``.
        ranks: Slots.
        micro_batch_size: Samples of a rank.
        samples: Of a step, all ranks.
        tokens_per_sample: 0 where a sample has none.
        step_seconds: Median.
        fast_step_seconds: Lower quartile.
        slow_step_seconds: Upper quartile.
        flops: Floating-point operations of a step, all ranks, forward and backward; None where they are unknown.
    """

    __pydantic_config__ = KNOWN_KEYS

    model: str
    num_parameters: Count | None
    strategy: str
    precision: str
    ranks: Count
    micro_batch_size: Count
    samples: Count
    tokens_per_sample: Bytes
    step_seconds: Positive
    fast_step_seconds: Positive
    slow_step_seconds: Positive
    flops: Positive | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.model, self.strategy, self.precision, self.ranks, self.micro_batch_size, self.samples

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        return self.samples / self.step_seconds

    @property
    def flops_per_s(self) -> float | None:
        """Of one rank."""
        return None if self.flops is None else self.flops / self.ranks / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class TimedCheckpoint:
    """What a checkpoint of a model takes, to one storage.

    Args:
        storage: ``run directory``, or the type of ``checkpoint_storage``.
        strategy: ``zero0`` ...
        ranks: That wrote and read it.
        size_bytes: Of all its files.
        write_seconds: Training waits so long for one that is written at once.
        stall_seconds: The same for one that is written while training continues; None where it cannot be.
        load_seconds: Until all ranks have it back.
        copy_seconds: Of a plain copy of its files within the same storage.
    """

    __pydantic_config__ = KNOWN_KEYS

    storage: str
    strategy: str
    ranks: Count
    size_bytes: Count
    write_seconds: Positive
    stall_seconds: Positive | None = None
    load_seconds: Positive
    copy_seconds: Positive | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """As of :class:`BenchRun`."""
        return self.storage, self.strategy, self.ranks

    @property
    def write_bytes_per_s(self) -> float:
        """Of all ranks together."""
        return self.size_bytes / self.write_seconds

    @property
    def load_bytes_per_s(self) -> float:
        """Of all ranks together."""
        return self.size_bytes / self.load_seconds


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"
