"""The hyperparameters that this library reads, typed and checked. All others belong to the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from determined_ds.config.deepspeed.instruments import contradicting
from determined_ds.config.fit_options import FitOptions, read_fit
from determined_ds.config.loggers import LOGGING, read_loggers
from determined_ds.config.numbers import AUTO, LARGEST, number, optional_size, wrong_type
from determined_ds.documents.document import (
    Document,
    KeyPath,
    dotted,
    nearest,
    one_of,
    unknown_key,
)
from determined_ds.documents.values import KINDS
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, chunks_problem
from determined_ds.pipe.partition import METHODS, method_problem


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the library reads of the hyperparameters; None or "auto" there is None here (derived)."""

    global_batch_size: int | None = None
    data_parallel_world_size: int | None = None
    pipe_parallel_size: int = 1
    model_parallel_size: int = 1
    sequence_parallel_size: int = 1
    deepspeed_config: str | dict[str, Any] | None = None
    overwrite_deepspeed_args: dict[str, Any] = field(default_factory=dict)
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    torch_compile: bool = False
    sdpa_kernel: str | None = None
    pipe_schedule: str = ONE_F_ONE_B
    pipe_chunks: int | None = None
    partition_method: str | None = None
    pipe_within_machine: bool = False
    expert_parallel_size: int | None = None
    fit: FitOptions = field(default_factory=FitOptions)
    trial_seed: int | None = None
    logging: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shorthands(self) -> dict[str, int]:
        """Those of :data:`SHORTHANDS` that are stated."""
        stated = {name: getattr(self, name) for name in SHORTHANDS}
        return {name: value for name, value in stated.items() if value is not None}


PARALLEL_SIZES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
SIZES = ("global_batch_size", "data_parallel_world_size", *PARALLEL_SIZES)
OVERWRITES, TRIAL_SEED = "overwrite_deepspeed_args", "trial_seed"
# Hyperparameter -> the value of the DeepSpeed JSON that it overwrites.
SHORTHANDS: dict[str, KeyPath] = {
    "zero_stage": ("zero_optimization", "stage"),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
}
# Numbers that may be 0 or have a largest value of their own.
RANGES = {
    "zero_stage": (0, 3),
    "micro_batch_size": (1, LARGEST),
    "pipe_chunks": (1, LARGEST),
    "expert_parallel_size": (1, LARGEST),
    TRIAL_SEED: (0, LARGEST),
}
OWN_KEYS = (
    *SIZES,
    "deepspeed_config",
    OVERWRITES,
    *SHORTHANDS,
    "torch_compile",
    "sdpa_kernel",
    "pipe_schedule",
    "pipe_chunks",
    "partition_method",
    "pipe_within_machine",
    "expert_parallel_size",
    "fit",
    TRIAL_SEED,
    LOGGING,
)
SWITCHES = ("torch_compile", "pipe_within_machine")
SDPA_KERNELS = ("flash", "efficient", "cudnn", "math")  # of torch.nn.attention.SDPBackend
# Name -> its values, and what they are.
ONE_OF = {
    "sdpa_kernel": (SDPA_KERNELS, "attention kernel of torch"),
    "pipe_schedule": (SCHEDULES, "schedule of a pipeline"),
}


def parse_hyperparameters(document: Document) -> Hyperparameters:
    """Read the library's own hyperparameters out of all of them.

    Raises:
        ConfigError: every wrong type, size and name at once. A misspelt name of the library's is refused too:
            it would not be read.
    """
    hyperparameters, problems = read_hyperparameters(document)
    if problems:
        raise ConfigError(problems)
    return hyperparameters


def read_hyperparameters(document: Document) -> tuple[Hyperparameters, list[Problem]]:
    """As :func:`parse_hyperparameters`, but hands back the problems; what is wrong is taken as absent."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name in SIZES:
        size = optional_size(document, (name,), problems)
        if size is not None:
            values[name] = size
    for name, (low, high) in RANGES.items():
        if document.get((name,)) not in (None, AUTO):
            values[name] = number(document, (name,), problems, low, high)
    for key in document.data:
        if key not in OWN_KEYS and _is_misspelt(key):
            problems.append(unknown_key(document, (key,), OWN_KEYS))
    ds_config = document.get(("deepspeed_config",))
    if ds_config is not None and not isinstance(ds_config, (str, dict)):
        fix = "write a path inside the context directory, or {type: const, val: {...}}"
        problems.append(wrong_type(document, ("deepspeed_config",), "a path or a mapping", fix))
        ds_config = None
    overwrite = document.get(("overwrite_deepspeed_args",))
    if overwrite is not None and not isinstance(overwrite, dict):
        fix = "write e.g. overwrite_deepspeed_args: {zero_optimization: {stage: 2}}"
        problems.append(wrong_type(document, ("overwrite_deepspeed_args",), "a mapping", fix))
        overwrite = None
    for name in SWITCHES:
        switch = document.get((name,))
        if isinstance(switch, bool):
            values[name] = switch
        elif switch is not None:
            problems.append(wrong_type(document, (name,), KINDS[bool], "write true or false"))
    for name, (known, what) in ONE_OF.items():
        value = document.get((name,))
        if value in known:
            values[name] = value
        elif value not in (None, AUTO):
            fix = f"{one_of(known, value)}, or leave it out"
            problems.append(document.problem((name,), f"is not a valid {what}", fix, "wrong-type"))
    method = document.get(("partition_method",))
    if method not in (None, AUTO):
        if not (wrong := method_problem(method)):
            values["partition_method"] = method
        else:
            fix = f"write {', '.join(METHODS)} or e.g. type:Block, or leave it out"
            problems.append(document.problem(("partition_method",), wrong, fix, "partition-method"))
    values["fit"] = read_fit(document, problems)
    values[LOGGING] = read_loggers(document, problems)
    read = Hyperparameters(
        **values,
        deepspeed_config=ds_config,
        overwrite_deepspeed_args=dict(overwrite or {}),
    )
    problems += _stated_twice(document, read)
    if read.pipe_chunks is not None and (wrong := chunks_problem(read.pipe_schedule, read.pipe_chunks)):
        fix = "change it, or leave it out"
        problems.append(document.problem(("pipe_chunks",), wrong, fix, "pipe-chunks"))
    return read, problems


def _stated_twice(document: Document, hyperparameters: Hyperparameters) -> list[Problem]:
    """A problem for each value that overwrites the JSON and that ``overwrite_deepspeed_args`` states otherwise."""
    problems = []
    for name, value in hyperparameters.shorthands.items():
        over: KeyPath = (OVERWRITES, *SHORTHANDS[name])
        stated = stated_at(document, over)
        if stated is not None and (stated != value or isinstance(stated, bool)):
            message = f"differs from {dotted(over)} = {shown(stated)} ({document.origin(over)})"
            fix = f"keep one of them: {name} stands for {dotted(over)}"
            problems.append(document.problem((name,), message, fix, "stated-twice"))
    return [*problems, *contradicting(document, OVERWRITES)]


def stated_at(document: Document, path: KeyPath) -> Any:
    """The value at a path, or what stands in its way; None where nothing, null or "auto" is there."""
    for end in range(1, len(path) + 1):
        value = document.get(path[:end])
        if value is None or value == AUTO:
            return None
        if not isinstance(value, dict):
            return value
    return None


def stated_seed(hyperparameters: Mapping[str, Any], drawn: int) -> int:
    """The seed that hyperparameters state, or else the one that a searcher draws for the trial."""
    stated = hyperparameters.get(TRIAL_SEED)
    return stated if isinstance(stated, int) else drawn


@functools.lru_cache(maxsize=4096)
def _is_misspelt(key: str) -> bool:
    guess = nearest(key, OWN_KEYS)
    # Close by spelling and of the same length: "global_batchsize" is misspelt, "batch_size" a model's own name.
    return (
        guess is not None and guess != "fit" and abs(len(guess) - len(key)) <= 2 and _edits(key, guess) <= 2
    )


def _edits(left: str, right: str) -> int:
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]
