"""What a configuration is to be chosen for: the answers that ``det-ds generate`` asks for, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from determined_ds.config.batch import complete_batch
from determined_ds.config.hyperparameters import LARGEST
from determined_ds.config.strategy import ELEMENT_BYTES
from determined_ds.config.topology import resolve_topology
from determined_ds.documents.document import nearest
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory import ModelShape, parse_bytes, parse_count, shape_from_sizes

T = TypeVar("T")

PRECISIONS = ("bf16", "fp16", "fp32")
OFFLOADS = ("none", "auto", "cpu", "nvme")
assert set(PRECISIONS) == ELEMENT_BYTES.keys()
LONGEST_SEQUENCE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A model, what it is to be trained on, and what was decided already.

    Args:
        shape: The model; its depth and width are those of published transformers of its size.
        gpus: Slots in all, >= 1.
        gpu_memory_bytes: Of one GPU.
        global_batch_size: Samples an optimizer step; replicas divide it.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        offload: ``none``; ``auto``: to host memory, if nothing fits without; ``cpu`` or ``nvme``: at any rate.
        nvme_path: Folder for what is offloaded to nvme, "" for none.
        pipe_parallel_size: Pipeline stages; 1 is no pipeline.
    """

    shape: ModelShape
    gpus: int
    gpu_memory_bytes: int
    global_batch_size: int
    precision: str = "bf16"
    offload: str = "none"
    nvme_path: str = ""
    pipe_parallel_size: int = 1

    def __post_init__(self) -> None:
        assert self.gpus % self.pipe_parallel_size == 0, self
        assert self.global_batch_size % self.replicas == 0, self

    @property
    def replicas(self) -> int:
        return self.gpus // self.pipe_parallel_size

    @property
    def samples_a_replica(self) -> int:
        """Samples of a replica in an optimizer step: micro-batch x accumulation."""
        return self.global_batch_size // self.replicas


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
) -> Needs:
    """Check what the flags of those names say.

    Args:
        model_size: Parameters, e.g. ``6B``.
        gpus: Slots in all.
        gpu_memory: Of one GPU, e.g. ``80GiB``.
        global_batch_size: Samples an optimizer step, all replicas.
        sequence_length: Tokens a sample.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        offload: ``none``, ``auto``, ``cpu`` or ``nvme``.
        nvme_path: Folder for what is offloaded to nvme.
        pipeline: Pipeline stages.

    Raises:
        ConfigError: everything that is wrong, with the nearest values that are right.
    """
    problems = [
        *_size("--gpus", gpus, LARGEST),
        *_size("--global-batch-size", global_batch_size, LARGEST),
        *_size("--sequence-length", sequence_length, LONGEST_SEQUENCE),
        *_size("--pipeline", pipeline, LARGEST),
        *_one_of("--precision", precision, PRECISIONS),
        *_one_of("--offload", offload, OFFLOADS),
        *_nvme(offload, nvme_path),
        *_offloaded_pipeline(offload, pipeline),
    ]
    wrong = {problem.key for problem in problems}
    parameters = _collect(problems, lambda: parse_count(model_size, key="--model-size"))
    memory = _collect(problems, lambda: parse_bytes(gpu_memory, key="--gpu-memory"))
    shape = None
    if parameters is not None and "--sequence-length" not in wrong:
        shape = shape_from_sizes(num_parameters=parameters, sequence_length=sequence_length)
    if not wrong & {"--gpus", "--pipeline"}:
        layout = _layout(problems, gpus, pipeline, shape)
        if layout and "--global-batch-size" not in wrong:
            _divides(problems, global_batch_size, layout)
    if problems:
        raise ConfigError(problems)
    assert shape is not None
    assert memory is not None
    return Needs(
        shape=shape,
        gpus=gpus,
        gpu_memory_bytes=memory,
        global_batch_size=global_batch_size,
        precision=precision,
        offload=offload,
        nvme_path=nvme_path,
        pipe_parallel_size=pipeline,
    )


def _collect(problems: list[Problem], step: Callable[[], T]) -> T | None:
    try:
        return step()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _size(flag: str, value: int, largest: int) -> Iterator[Problem]:
    if value < 1:
        yield Problem(key=flag, value=value, message="must be 1 or more", fix="give a positive number")
    elif value > largest:
        yield Problem(
            key=flag, value=value, message=f"must be at most {largest}", fix="give a smaller number"
        )


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> Iterator[Problem]:
    if value not in known:
        guess = nearest(value.lower(), known)
        hint = f"did you mean {guess}? " if guess else ""
        yield Problem(
            key=flag,
            value=value,
            message="is none of its values",
            fix=f"{hint}use one of {', '.join(known)}",
            code="out-of-range",
        )


def _nvme(offload: str, nvme_path: str) -> Iterator[Problem]:
    if offload == "nvme" and not nvme_path:
        message, fix = (
            "missing: --offload nvme needs a folder for its files",
            "give e.g. --nvme-path /local_nvme",
        )
        yield Problem(key="--nvme-path", message=message, fix=fix, code="offload-nvme-path")
    elif nvme_path and offload != "nvme":
        message, fix = f"is not used: --offload is {offload}", "give --offload nvme, or leave it out"
        yield Problem(key="--nvme-path", value=nvme_path, message=message, fix=fix, code="offload-nvme-path")


def _offloaded_pipeline(offload: str, pipeline: int) -> Iterator[Problem]:
    """Measured with deepspeed 0.19.8: in bf16, the weights of such a run do not come back from a checkpoint exactly."""
    if offload in ("cpu", "nvme") and pipeline > 1:
        message = f"a pipeline of {pipeline} stages keeps its optimizer on the GPUs"
        fix = "leave out --offload, or --pipeline"
        yield Problem(key="--offload", value=offload, message=message, fix=fix, code="offload-pipeline")


def _layout(problems: list[Problem], gpus: int, pipeline: int, shape: ModelShape | None) -> int | None:
    """Replicas; None where the GPUs cannot be laid out."""
    found: list[Problem] = []
    topology = _collect(found, lambda: resolve_topology(slots=gpus, pipe_parallel_size=pipeline))
    for problem in found:
        fix = problem.fix.replace("pipe_parallel_size", "--pipeline").replace("slots", "GPUs")
        message = f"a pipeline of {pipeline} stages does not divide {gpus} GPUs"
        problems.append(
            dataclasses.replace(problem, key="--pipeline", value=pipeline, message=message, fix=fix)
        )
    if shape is not None and pipeline > shape.num_layers:
        message = f"a model of this size has about {shape.num_layers} layers, fewer than stages"
        fix = f"use at most {shape.num_layers}"
        problems.append(
            Problem(key="--pipeline", value=pipeline, message=message, fix=fix, code="pipeline-layers")
        )
    return topology.data_parallel_world_size if topology else None


def _divides(problems: list[Problem], global_batch_size: int, replicas: int) -> None:
    found: list[Problem] = []
    _collect(found, lambda: complete_batch(global_batch_size=global_batch_size, replicas=replicas))
    for problem in found:
        flag = "--global-batch-size"
        message = f"is not a multiple of the {replicas} replicas"
        fix = problem.fix.replace("global_batch_size", flag)
        problems.append(dataclasses.replace(problem, key=flag, message=message, fix=fix))
