"""The hyperparameters that this library reads, typed and checked. All others belong to the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from determined_ds.config.deepspeed.instruments import contradicting
from determined_ds.config.loggers import LOGGING, read_loggers
from determined_ds.config.profiled_steps import ProfiledSteps, read_profiled_steps
from determined_ds.documents.document import (
    Document,
    KeyPath,
    dotted,
    nearest,
    one_of,
    unknown_key,
    unknown_keys,
)
from determined_ds.documents.values import KINDS, kind_of, type_fix
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, chunks_problem

AUTO = "auto"
LARGEST = 2**31 - 1
CHECKPOINT_POLICIES = ("best", "all", "none")
WARM_STARTS = ("weights", "all")


@dataclass(frozen=True, kw_only=True)
class Length:
    """A length or a period of training, in batches or in epochs; a list of them is a schedule.

    Args:
        unit: ``batches`` or ``epochs``.
        value: An integer >= 1, or the numbers after which something happens.
    """

    unit: str
    value: int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A period by the clock.

    Args:
        unit: ``seconds``, ``minutes`` or ``hours``.
        value: A number > 0.
    """

    unit: str
    value: float

    @property
    def seconds(self) -> float:
        """The same in seconds."""
        return self.value * TIME_UNITS[self.unit]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Arguments of ``Trainer.fit``, by the same names. None: as Determined defaults it.

    The last ones are not Determined's: ``stop_on_nan`` stops a run at a loss that is not finite,
    ``save_total_limit`` is the number of checkpoints to keep, the best and the newest always among them,
    ``warm_start`` is what a fork takes of its checkpoint: its weights alone, or all that an engine holds, and
    ``asynchronous_checkpoints`` says whether training continues while one is written; None: where that is worth it.
    ``profile`` says which steps are recorded by torch's profiler; None: none. ``breakdown`` switches on DeepSpeed's
    instruments, and has reports say what they read.
    """

    max_length: Length | None = None
    validation_period: Length | None = None
    checkpoint_period: Length | Duration | None = None
    reporting_period: Length | None = None
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    profiling_enabled: bool = False
    stop_on_nan: bool = True
    save_total_limit: int | None = None
    warm_start: str = "weights"
    asynchronous_checkpoints: bool | None = None
    profile: ProfiledSteps | None = None
    breakdown: bool = False


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
    fit: FitOptions = field(default_factory=FitOptions)
    trial_seed: int | None = None
    logging: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shorthands(self) -> dict[str, int]:
        """Those of :data:`SHORTHANDS` that are stated."""
        stated = {name: getattr(self, name) for name in SHORTHANDS}
        return {name: value for name, value in stated.items() if value is not None}


CHOICES = {"checkpoint_policy": CHECKPOINT_POLICIES, "warm_start": WARM_STARTS}
PARALLEL_SIZES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
SIZES = ("global_batch_size", "data_parallel_world_size", *PARALLEL_SIZES)
UNITS = ("batches", "epochs")
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
# Why the others are not by the clock.
ONLY_COUNTED = {
    "max_length": "how much is trained would depend on the machine",
    "validation_period": "what is best, what a searcher stops and what a schedule does would differ from run to run",
    "reporting_period": "the metrics of two runs could not be compared",
}
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")
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
    "fit",
    TRIAL_SEED,
    LOGGING,
)
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
        size = _size(document, (name,), problems)
        if size is not None:
            values[name] = size
    for name, (low, high) in RANGES.items():
        if document.get((name,)) not in (None, AUTO):
            values[name] = _number(document, (name,), problems, low, high)
    for key in document.data:
        if key not in OWN_KEYS and _is_misspelt(key):
            problems.append(unknown_key(document, (key,), OWN_KEYS))
    ds_config = document.get(("deepspeed_config",))
    if ds_config is not None and not isinstance(ds_config, (str, dict)):
        fix = "write a path inside the context directory, or {type: const, val: {...}}"
        problems.append(_wrong(document, ("deepspeed_config",), "a path or a mapping", fix))
        ds_config = None
    overwrite = document.get(("overwrite_deepspeed_args",))
    if overwrite is not None and not isinstance(overwrite, dict):
        fix = "write e.g. overwrite_deepspeed_args: {zero_optimization: {stage: 2}}"
        problems.append(_wrong(document, ("overwrite_deepspeed_args",), "a mapping", fix))
        overwrite = None
    torch_compile = document.get(("torch_compile",))
    if isinstance(torch_compile, bool):
        values["torch_compile"] = torch_compile
    elif torch_compile is not None:
        problems.append(_wrong(document, ("torch_compile",), KINDS[bool], "write true or false"))
    for name, (known, what) in ONE_OF.items():
        value = document.get((name,))
        if value in known:
            values[name] = value
        elif value not in (None, AUTO):
            fix = f"{one_of(known, value)}, or leave it out"
            problems.append(document.problem((name,), f"is not a valid {what}", fix, "wrong-type"))
    values["fit"] = _fit(document, problems)
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


def _wrong(document: Document, path: KeyPath, wanted: str, fix: str) -> Problem:
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return document.problem(path, message, fix, "wrong-type")


def _size(document: Document, path: KeyPath, problems: list[Problem]) -> int | None:
    """An integer >= 1; None where it is absent or "auto"."""
    if document.get(path) in (None, AUTO):
        return None
    return _number(document, path, problems)


def _number(
    document: Document, path: KeyPath, problems: list[Problem], low: int = 1, high: int = LARGEST
) -> int | None:
    value = document.get(path)
    if isinstance(value, bool) or not isinstance(value, int):
        problems.append(_wrong(document, path, KINDS[int], type_fix(int, value)))
        return None
    if low <= value <= high:
        return value
    message = f"must be {low} or more" if value < low else f"must be at most {high}"
    fix = "write a positive number" if value < low else "write a smaller number"
    problems.append(document.problem(path, message, fix, "out-of-range"))
    return None


def _fit(document: Document, problems: list[Problem]) -> FitOptions:
    fit = document.get(("fit",))
    if fit is None:
        return FitOptions()
    if not isinstance(fit, dict):
        problems.append(
            _wrong(document, ("fit",), "a mapping", "write e.g. fit: {max_length: {batches: 200}}")
        )
        return FitOptions()
    known = FitOptions.__dataclass_fields__
    values: dict[str, Any] = {}
    for key, value in fit.items():
        path: KeyPath = ("fit", key)
        if key not in known:
            problems.append(unknown_key(document, path, known))
        elif value is None:
            continue
        elif key in LENGTHS:
            values[key] = _length(document, path, problems)
        elif key == "save_total_limit":
            values[key] = _size(document, path, problems)
        elif key == "profile":
            continue  # below: it depends on the length
        elif key in CHOICES:
            if isinstance(value, str) and value in CHOICES[key]:
                values[key] = value
            else:
                fix = one_of(CHOICES[key], value)
                message = f"is not a valid {key.replace('_', ' ')}"
                problems.append(document.problem(path, message, fix, "out-of-range"))
        elif isinstance(value, bool):
            values[key] = value
        else:
            problems.append(_wrong(document, path, KINDS[bool], "write true or false"))
    if fit.get("profile") is not None:
        values["profile"], wrong = read_profiled_steps(
            document, ("fit", "profile"), num_batches=_in_batches(values.get("max_length"))
        )
        problems += wrong
    return FitOptions(**values)


def _in_batches(length: Length | None) -> int | None:
    """How many, where a length is in batches."""
    is_known = length is not None and length.unit == "batches" and isinstance(length.value, int)
    return length.value if is_known else None  # type: ignore[union-attr, return-value]


def _length(document: Document, path: KeyPath, problems: list[Problem]) -> Length | Duration | None:
    """``{batches: 200}``, ``{epochs: 3}``, a schedule ``{batches: [5, 30]}``, or for checkpoints ``{minutes: 15}``."""
    value, name = document.get(path), path[-1]
    by_clock = name not in ONLY_COUNTED
    units = (*UNITS, *TIME_UNITS) if by_clock else UNITS
    form = f"write {{batches: N}} or {{epochs: N}}{', or by the clock {minutes: N}' if by_clock else ''}"
    if not isinstance(value, dict):
        plain = isinstance(value, int) and not isinstance(value, bool) and value > 0
        fix = f"write {{batches: {value}}}" if plain else form
        problems.append(_wrong(document, path, "a mapping with batches or epochs", fix))
        return None
    if not by_clock and (clock := [unit for unit in value if unit in TIME_UNITS]):
        message = f"cannot be in {clock[0]}: {ONLY_COUNTED[str(name)]}"
        problems.append(document.problem((*path, clock[0]), message, form, "invalid"))
        return None
    if unknown := list(unknown_keys(document, path, units)):
        problems += unknown
        return None
    given = {unit: number for unit, number in value.items() if number is not None}
    if len(given) != 1:
        problems.append(_not_one_unit(document, path, list(given), form, units))
        return None
    ((unit, number),) = given.items()
    here = (*path, unit)
    if unit in TIME_UNITS:
        return _duration(document, here, problems)
    if not isinstance(number, list) or name == "max_length":
        size = _number(document, here, problems)
        return None if size is None else Length(unit=unit, value=size)
    if not number:
        problems.append(document.problem(here, "an empty schedule", "write e.g. [5, 30]", "out-of-range"))
        return None
    numbers = [_number(document, (*here, index), problems) for index in range(len(number))]
    return Length(unit=unit, value=tuple(sorted({size for size in numbers if size is not None})))


def _not_one_unit(
    document: Document, path: KeyPath, given: list[str], form: str, units: Sequence[str]
) -> Problem:
    if not given:
        return document.problem(path, "gives neither batches nor epochs", form, "invalid")
    # One from the command line is the intended one.
    stated = [unit for unit in given if document.origin((*path, unit)).startswith("--")]
    kept = stated[0] if len(stated) == 1 else given[0] if "batches" not in given else "batches"
    other = next(unit for unit in given if unit != kept)
    fix = f"keep one; --set {document.key(path)}.{other}=null removes the other"
    both = " and ".join(sorted(given, key=units.index))
    return document.problem(path, f"gives both {both}", fix, "invalid")


def _duration(document: Document, path: KeyPath, problems: list[Problem]) -> Duration | None:
    value = document.get(path)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problems.append(_wrong(document, path, "a number", "write e.g. {minutes: 15}"))
        return None
    if not 0 < value <= LARGEST:
        problems.append(
            document.problem(path, "must be more than 0", "write e.g. {minutes: 15}", "out-of-range")
        )
        return None
    return Duration(unit=str(path[-1]), value=value)
