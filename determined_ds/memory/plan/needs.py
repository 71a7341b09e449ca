"""What a configuration is chosen for: the flags of ``det-ds generate``, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from determined_ds.config.batch import complete_batch
from determined_ds.config.numbers import LARGEST
from determined_ds.config.strategy import ELEMENT_BYTES
from determined_ds.config.topology import resolve_topology
from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.memory import ModelShape, parse_bytes, parse_count, shape_from_sizes

PRECISIONS = ("bf16", "fp16", "fp32")
OFFLOADS = ("none", "auto", "cpu", "nvme")
assert set(PRECISIONS) == ELEMENT_BYTES.keys()
LONGEST_SEQUENCE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, the GPUs to train it on, and what the user has decided already.

    Args:
        shape: The model; its depth and width are those of published transformers of its size.
        gpus: Slots in all, >= 1.
        gpu_memory_bytes: Of one GPU.
        global_batch_size: Samples an optimizer step; replicas divide it.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        offload: ``none``; ``auto``: to host memory, if nothing fits without it; ``cpu`` or ``nvme``: always.
        nvme_path: Folder for what is offloaded to nvme, "" for none.
        pipe_parallel_size: Pipeline stages; 1: without a pipeline.
        is_script: A script is to be trained, whose engine has a schedule and a partition of its own.
        slices: What the number of ranks that share a sequence must divide: the tokens of a sequence, and the attention
            heads. 1: sequences are whole.
    """

    shape: ModelShape
    gpus: int
    gpu_memory_bytes: int
    global_batch_size: int
    precision: str = "bf16"
    offload: str = "none"
    nvme_path: str = ""
    pipe_parallel_size: int = 1
    is_script: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        assert self.gpus % self.pipe_parallel_size == 0, self
        assert self.splits, self

    @property
    def splits(self) -> tuple[int, ...]:
        """How many ranks may share a sequence, the fewest first; see :func:`possible_splits`."""
        return possible_splits(self.gpus, self.pipe_parallel_size, self.global_batch_size, self.slices)


def possible_splits(gpus: int, stages: int, global_batch_size: int, slices: int) -> tuple[int, ...]:
    """How many ranks may share a sequence: 1, where the replicas divide the batch, and what may follow it.

    Without a pipeline, whose engine takes no such groups. Where there are more GPUs than sequences in a step, at least
    as many as leave a replica a sequence.

    Args:
        gpus: In all, a multiple of ``stages``.
        stages: Of the pipeline; 1: none.
        global_batch_size: Sequences of a step.
        slices: See :class:`PlanRequest`.
    """
    most = math.gcd(gpus, slices) if stages == 1 else 1
    each = (size for size in range(1, most + 1) if most % size == 0)
    found = tuple(size for size in each if global_batch_size % (gpus // stages // size) == 0)
    return found if 1 in found or gpus > global_batch_size else ()


def read_needs(
    *,
    model_size: str,
    gpus: int,
    gpu_memory: str,
    global_batch_size: int,
    sequence_length: int,
    precision: str = "bf16",
    offload: str = "none",
    nvme_path: str = "",
    pipeline: int = 1,
    num_heads: int | None = 1,
) -> PlanRequest:
    """Check the flags of ``det-ds generate`` that have these names; see :class:`PlanRequest`.

    Args:
        num_heads: Attention heads, where ranks may share a sequence; 1: they may not. None: as many as a model of the
            size has.

    Raises:
        ConfigError: everything that is wrong, with the nearest values that are right.
    """
    found = Problems()
    found.problems += [
        *_count("--gpus", gpus),
        *_count("--global-batch-size", global_batch_size),
        *_count("--sequence-length", sequence_length, LONGEST_SEQUENCE),
        *_count("--pipeline", pipeline),
        *_one_of("--precision", precision, PRECISIONS),
        *_one_of("--offload", offload, OFFLOADS),
        *_nvme(offload, nvme_path),
        *_offloaded_pipeline(offload, pipeline),
    ]
    wrong = {problem.key for problem in found.problems}
    parameters = found.of(lambda: parse_count(model_size, key="--model-size"))
    memory = found.of(lambda: parse_bytes(gpu_memory, key="--gpu-memory"))
    shape = None
    if parameters is not None and "--sequence-length" not in wrong:
        shape = shape_from_sizes(num_parameters=parameters, sequence_length=sequence_length)
    heads = num_heads or (1 if shape is None else shape.num_heads)
    slices = max(1, math.gcd(heads, sequence_length))
    if not wrong & {"--gpus", "--pipeline"}:
        found.problems += _layout(gpus, pipeline, shape)
        is_known = not gpus % pipeline and "--global-batch-size" not in wrong
        if is_known and not possible_splits(gpus, pipeline, global_batch_size, slices):
            found.problems += _division(global_batch_size, gpus // pipeline)
    found.raise_any()
    assert shape is not None
    assert memory is not None
    return PlanRequest(
        shape=shape,
        gpus=gpus,
        gpu_memory_bytes=memory,
        global_batch_size=global_batch_size,
        precision=precision,
        offload=offload,
        nvme_path=nvme_path,
        pipe_parallel_size=pipeline,
        slices=slices,
    )


def _count(flag: str, value: int, most: int = LARGEST) -> Iterator[Problem]:
    if not 1 <= value <= most:
        message, fix = (
            ("must be 1 or more", "give a positive number")
            if value < 1
            else (f"must be at most {most}", "give a smaller number")
        )
        yield Problem(key=flag, value=value, message=message, fix=fix, code="out-of-range")


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if value not in known:
        message = f"must be one of {', '.join(known)}"
        yield Problem(key=flag, value=value, message=message, fix=one_of(known, value), code="out-of-range")


def _nvme(offload: str, nvme_path: str) -> Iterator[Problem]:
    key, code = "--nvme-path", "offload-nvme-path"
    if offload == "nvme" and not nvme_path:
        message = "missing: --offload nvme needs a folder for its files"
        yield Problem(key=key, message=message, fix="give e.g. --nvme-path /local_nvme", code=code)
    elif nvme_path and offload != "nvme":
        message, fix = f"is not used: --offload is {offload}", "give --offload nvme, or leave it out"
        yield Problem(key=key, value=nvme_path, message=message, fix=fix, code=code)


def _offloaded_pipeline(offload: str, pipeline: int) -> Iterator[Problem]:
    """Measured with deepspeed 0.19.8: in bf16, such a run does not restore its weights from a checkpoint exactly."""
    if offload in ("cpu", "nvme") and pipeline > 1:
        message = f"a pipeline of {pipeline} stages keeps its optimizer on the GPUs"
        fix = "leave out --offload, or --pipeline"
        yield Problem(key="--offload", value=offload, message=message, fix=fix, code="offload-pipeline")


def _layout(gpus: int, pipeline: int, shape: ModelShape | None) -> Iterator[Problem]:
    """Stages that do not divide the GPUs, or are more than the model's layers."""
    key = "--pipeline"
    try:
        resolve_topology(slots=gpus, pipe_parallel_size=pipeline)
    except ConfigError as error:
        for problem in error.problems:
            fix = problem.fix.replace("pipe_parallel_size", key).replace("slots", "GPUs")
            message = f"a pipeline of {pipeline} stages does not divide {gpus} GPUs"
            yield replace(problem, key=key, value=pipeline, message=message, fix=fix)
    if shape is not None and pipeline > shape.num_layers:
        message = f"a model of this size has about {shape.num_layers} layers, fewer than stages"
        fix = f"use at most {shape.num_layers}"
        yield Problem(key=key, value=pipeline, message=message, fix=fix, code="pipeline-layers")


def _division(global_batch_size: int, replicas: int) -> Iterator[Problem]:
    """A batch that the replicas do not divide."""
    try:
        complete_batch(global_batch_size=global_batch_size, replicas=replicas)
    except ConfigError as error:
        for problem in error.problems:
            flag = "--global-batch-size"
            fix = problem.fix.replace("global_batch_size", flag)
            yield replace(
                problem, key=flag, message=f"must be a multiple of the {replicas} replicas", fix=fix
            )
