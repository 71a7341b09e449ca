"""The hyperparameters that this library reads, typed and checked. All others belong to the model."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from determined_ds.config.loggers import read_loggers
from determined_ds.config.models import AUTO as AUTO
from determined_ds.config.models import LARGEST as LARGEST
from determined_ds.config.models import (
    Count,
    Range,
    Size,
    option,
    read_model,
    read_value,
    wrong_type,
)
from determined_ds.documents.document import (
    Document,
    KeyPath,
    dotted,
    unknown_key,
    unknown_keys,
    words,
)
from determined_ds.documents.text import type_fix
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, chunks_problem
from determined_ds.pipe.partition import METHODS, method_problem

# ------------------------------------------------------------------------------------------- fit

UNITS = ("batches", "epochs")
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
# Why the others are not by the clock.
ONLY_COUNTED = {
    "max_length": "how much is trained would depend on the machine",
    "validation_period": "what is best, what a searcher stops and what a schedule does would differ from run to run",
    "reporting_period": "the metrics of two runs could not be compared",
}
WARM_STARTS = ("weights", "all")
MOST_ACTIVE = (
    50  # steps: a trace of GPT-2 takes megabytes a step on a disk, and a hundred times that in memory
)
_COUNTED = "{batches: N} or {epochs: N}"


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
class ProfiledSteps:
    """Which steps of a process torch's profiler records, one after the other."""

    wait: Count = option(5, "Steps that are trained first, without the profiler.")
    warmup: Count = option(
        2, "Steps for which the profiler runs and records nothing, because its first steps are slower."
    )
    active: Annotated[int, Range(1, MOST_ACTIVE)] = option(
        3, "Steps that are recorded.", fix="write 3 to 10, which is enough for a mean"
    )

    @property
    def total(self) -> int:
        """Steps until all are recorded."""
        return self.wait + self.warmup + self.active


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Arguments of ``Trainer.fit``, by the same names. None: as Determined defaults it."""

    max_length: Length | None = option(None, "How long to train.", form=_COUNTED)
    validation_period: Length | None = option(
        None, "How often to validate; a list of numbers validates after each of them.", form=_COUNTED
    )
    checkpoint_period: Length | Duration | None = option(
        None,
        "How often to write a checkpoint; a list of numbers writes one after each of them.",
        form=f"{_COUNTED}, or {{minutes: N}}",
    )
    reporting_period: Length | None = option(None, "How often to report training metrics.", form=_COUNTED)
    checkpoint_policy: Literal["best", "all", "none"] = option(
        "best",
        "Whether a validation is followed by a checkpoint: only if it is the best so far, always, or never.",
    )
    step_zero_validation: bool = option(False, "Validate once before the first step.")
    profiling_enabled: bool = option(False, "Report the use of the machine to Determined's profiler.")
    stop_on_nan: bool = option(True, "Stop the run at a loss that is not finite.")
    save_total_limit: Size | None = option(
        None, "Checkpoints to keep while training; the best and the newest are always kept.", auto=True
    )
    warm_start: Literal["weights", "all"] = option(
        "weights",
        "What is taken of the checkpoint that the searcher names: the weights, or all that the engine holds.",
    )
    asynchronous_checkpoints: bool | None = option(
        None, "Continue training while a checkpoint is written; by default where that is worth it."
    )
    profile: ProfiledSteps | None = option(
        None, "Record some steps by torch's profiler.", form="{wait: N, warmup: N, active: N}"
    )


def _read_fit(document: Document, problems: list[Problem]) -> FitOptions:
    fit = document.get(("fit",))
    if not isinstance(fit, dict):
        if fit is not None:
            fix = "write e.g. fit: {max_length: {batches: 200}}"
            problems.append(wrong_type(document, ("fit",), "a mapping", fix))
        return FitOptions()
    known = FitOptions.__dataclass_fields__
    problems += [unknown_key(document, ("fit", key), known) for key in fit if key not in known]
    values = read_model(FitOptions, document, ("fit",), problems)
    for name in ("max_length", "validation_period", "checkpoint_period", "reporting_period"):
        if fit.get(name) is not None:
            values[name] = _length(document, ("fit", name), problems)
    if fit.get("profile") is not None:
        length = values.get("max_length")
        num_batches = length.value if length is not None and length.unit == "batches" else None
        values["profile"], wrong = read_profiled_steps(document, ("fit", "profile"), num_batches=num_batches)
        problems += wrong
    return FitOptions(**values)


def _length(document: Document, path: KeyPath, problems: list[Problem]) -> Length | Duration | None:
    """``{batches: 200}``, ``{epochs: 3}``, a schedule ``{batches: [5, 30]}``, or for checkpoints ``{minutes: 15}``."""
    value, name = document.get(path), path[-1]
    if isinstance(value, dict) and len(value) == 1:  # at once, for the points of a search
        ((unit, number),) = value.items()
        if unit in UNITS and type(number) is int and 0 < number <= LARGEST:
            return Length(unit=unit, value=number)
    by_clock = name not in ONLY_COUNTED
    units = (*UNITS, *TIME_UNITS) if by_clock else UNITS
    form = f"write {_COUNTED}{', or by the clock {minutes: N}' if by_clock else ''}"
    if not isinstance(value, dict):
        plain = isinstance(value, int) and not isinstance(value, bool) and value > 0
        fix = f"write {{batches: {value}}}" if plain else form
        problems.append(wrong_type(document, path, "a mapping with batches or epochs", fix))
        return None
    if not by_clock and (clock := [unit for unit in value if unit in TIME_UNITS]):
        message = f"cannot be in {clock[0]}: {ONLY_COUNTED[str(name)]}"
        problems.append(document.problem((*path, clock[0]), message, form))
        return None
    if unknown := list(unknown_keys(document, path, units)):
        problems += unknown
        return None
    given = sorted((unit for unit, number in value.items() if number is not None), key=units.index)
    if not given:
        problems.append(document.problem(path, "gives neither batches nor epochs", form))
        return None
    if len(given) > 1:  # one from the command line is the intended one
        stated = [unit for unit in given if document.origin((*path, unit)).startswith("--")]
        kept = stated[0] if len(stated) == 1 else given[0]
        other = next(unit for unit in given if unit != kept)
        fix = f"keep one; --set {document.key(path)}.{other}=null removes the other"
        problems.append(document.problem(path, f"gives both {' and '.join(given)}", fix))
        return None
    unit, number = given[0], value[given[0]]
    here = (*path, unit)
    if unit in TIME_UNITS:
        example = "write e.g. {minutes: 15}"
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            problems.append(wrong_type(document, here, "a number", example))
        elif not 0 < number <= LARGEST:
            problems.append(document.problem(here, "must be more than 0", example, "out-of-range"))
        else:
            return Duration(unit=unit, value=number)
        return None
    if number == [] and name != "max_length":
        problems.append(document.problem(here, "an empty schedule", "write e.g. [5, 30]", "out-of-range"))
        return None
    if isinstance(number, list) and name != "max_length":
        found = [read_value(Size, document, (*here, index), problems) for index in range(len(number))]
        return Length(unit=unit, value=tuple(sorted({size for size in found if size is not None})))
    size = read_value(Size, document, here, problems)
    return None if size is None else Length(unit=unit, value=size)


def read_profiled_steps(
    document: Document, path: KeyPath, *, num_batches: int | None = None
) -> tuple[ProfiledSteps | None, list[Problem]]:
    """Read ``fit.profile``.

    Args:
        document: The hyperparameters.
        path: Of the value, which is there.
        num_batches: How many are trained; None where that is not known, or not in batches.

    Returns:
        The steps, None where they are wrong; and what is.
    """
    if not isinstance(document.get(path), dict):
        return None, [wrong_type(document, path, "a mapping", "write e.g. {wait: 5, warmup: 2, active: 3}")]
    problems = list(unknown_keys(document, path, ProfiledSteps.__dataclass_fields__))
    values = read_model(ProfiledSteps, document, path, problems)
    if problems:
        return None, problems
    steps = ProfiledSteps(**values)
    if num_batches is not None and steps.total > num_batches:
        message = f"needs {steps.total} batches (wait + warmup + active), and fit.max_length is {num_batches}"
        fix = "train more, or lower wait" if steps.wait else "train more, or lower active"
        return None, [document.problem(path, message, fix, "out-of-range")]
    return steps, []


# ------------------------------------------------------------------------------------------- all of them

SDPA_KERNELS = ("flash", "efficient", "cudnn", "math")  # of torch.nn.attention.SDPBackend
OVERWRITES, TRIAL_SEED = "overwrite_deepspeed_args", "trial_seed"


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the library reads of the hyperparameters; None or "auto" there is None here (derived)."""

    global_batch_size: Size | None = option(
        None, "Samples of an optimizer step over all replicas: DeepSpeed's train_batch_size.", auto=True
    )
    data_parallel_world_size: Size | None = option(
        None, "Replicas of the model; by default the slots divided by the other sizes.", auto=True
    )
    pipe_parallel_size: Size = option(
        1, "Stages of a pipeline that the model's layers are cut into.", auto=True
    )
    model_parallel_size: Size = option(1, "Ranks that share each layer by tensor parallelism.", auto=True)
    sequence_parallel_size: Size = option(1, "Ranks that share each sequence by Ulysses.", auto=True)
    deepspeed_config: str | dict[str, Any] | None = option(
        None,
        "The DeepSpeed JSON: a path inside the context directory, or the mapping itself.",
        wanted="a path or a mapping",
        fix="write a path inside the context directory, or {type: const, val: {...}}",
    )
    overwrite_deepspeed_args: dict[str, Any] = option(
        dict,
        "Values that are written over the DeepSpeed JSON, leaf by leaf.",
        fix="write e.g. overwrite_deepspeed_args: {zero_optimization: {stage: 2}}",
    )
    zero_stage: Annotated[int, Range(0, 3)] | None = option(
        None, "ZeRO stage; overwrites zero_optimization.stage of the DeepSpeed JSON.", auto=True
    )
    micro_batch_size: Size | None = option(
        None,
        "Samples of a forward pass of one replica; overwrites train_micro_batch_size_per_gpu.",
        auto=True,
    )
    torch_compile: bool = option(False, "Compile the model by torch.compile.")
    sdpa_kernel: Literal["flash", "efficient", "cudnn", "math"] | None = option(
        None, "The kernel of torch's scaled_dot_product_attention; by default torch chooses.", auto=True
    )
    pipe_schedule: str = option(
        ONE_F_ONE_B, "The order in which a pipeline's ranks compute.", auto=True, choices=SCHEDULES
    )
    pipe_chunks: Size | None = option(
        None, "Parts of the model that each rank of a pipeline holds, for schedules with several.", auto=True
    )
    partition_method: str | None = option(
        None,
        "How a pipeline's layers are divided among its stages.",
        form=f"one of {', '.join(METHODS)}, or type:REGEX",
    )
    pipe_within_machine: bool = option(
        False, "Place the stages of a pipeline on neighbouring ranks, within a machine."
    )
    expert_parallel_size: Size | None = option(
        None, "Ranks that the experts of a mixture are divided over by DeepSpeed's AutoEP.", auto=True
    )
    fit: FitOptions = option(FitOptions, "Arguments of Trainer.fit.", form="a mapping")
    trial_seed: Count | None = option(
        None, "The seed of the trial, instead of the one that a searcher draws.", auto=True
    )
    logging: dict[str, dict[str, Any]] = option(
        dict, "Tools that the run is reported to, each with its options.", form="a mapping"
    )

    @property
    def shorthands(self) -> dict[str, int]:
        """Those of :data:`SHORTHANDS` that are stated."""
        stated = {name: getattr(self, name) for name in SHORTHANDS}
        return {name: value for name, value in stated.items() if value is not None}


PARALLEL_SIZES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
TOTAL = "global_batch_size"
SIZES = (TOTAL, "data_parallel_world_size", *PARALLEL_SIZES)
OWN_KEYS = tuple(Hyperparameters.__dataclass_fields__)
# Hyperparameter -> the value of the DeepSpeed JSON that it overwrites.
SHORTHANDS: dict[str, KeyPath] = {
    "zero_stage": ("zero_optimization", "stage"),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
}
# A name that other libraries use -> where its value is read.
BY_OTHER_NAMES: dict[str, KeyPath] = {
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), ("pipe_parallel_size",)),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), ("model_parallel_size",)),
    "data_parallel_size": ("data_parallel_world_size",),
    "train_batch_size": ("global_batch_size",),
    "train_micro_batch_size_per_gpu": ("micro_batch_size",),
    "micro_batch_size_per_gpu": ("micro_batch_size",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "gradient_accumulation_steps": (OVERWRITES, "gradient_accumulation_steps"),
    "bf16": (OVERWRITES, "bf16", "enabled"),
    "fp16": (OVERWRITES, "fp16", "enabled"),
}
# A name that is not read, though it suggests so -> the fix.
NOT_READ: dict[str, str] = {
    "batch_size": "write global_batch_size (samples of an optimizer step, all replicas); if batch_size is the model's"
    " own, state global_batch_size beside it",
    "ds_config": "write deepspeed_config: the path of the JSON in the context directory",
    "zero_optimization": f"write {OVERWRITES}: {{zero_optimization: {{...}}}}",
    **{
        name: f"write {OVERWRITES}: {{zero_optimization: {{{name}: {{device: cpu}}}}}}"
        for name in ("offload_optimizer", "offload_param")
    },
    "slots_per_trial": "write resources.slots_per_trial, beside hyperparameters",
}
# Numbers of the model's that fill the DeepSpeed JSON, or a trial's own optimizer: none is negative.
BELOW_ONE = words("adam_beta1 adam_beta2")
NUMBERS = BELOW_ONE | words("""learning_rate lr warmup_min_lr warmup_max_lr warmup_num_steps warmup_steps
    total_num_steps weight_decay eps adam_epsilon gradient_clipping max_grad_norm""")


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
    values = read_model(Hyperparameters, document, (), problems)
    for key in document.data:
        if key in NUMBERS:
            problems += _not_a_number(document, key)
        elif key not in OWN_KEYS and _is_misspelt(key):
            problems.append(unknown_key(document, (key,), OWN_KEYS))
    method = document.get(("partition_method",))
    if method not in (None, AUTO):
        if not (wrong := method_problem(method)):
            values["partition_method"] = method
        else:
            fix = f"write {', '.join(METHODS)} or e.g. type:Block, or leave it out"
            problems.append(document.problem(("partition_method",), wrong, fix, "partition-method"))
    read = Hyperparameters(
        **values, fit=_read_fit(document, problems), logging=read_loggers(document, problems)
    )
    for name, value in read.shorthands.items():
        over: KeyPath = (OVERWRITES, *SHORTHANDS[name])
        stated = stated_at(document, over)
        if stated is not None and (stated != value or isinstance(stated, bool)):
            message = f"differs from {dotted(over)} = {shown(stated)} ({document.origin(over)})"
            fix = f"keep one of them: {name} stands for {dotted(over)}"
            problems.append(document.problem((name,), message, fix, "stated-twice"))
    if read.pipe_chunks is not None and (wrong := chunks_problem(read.pipe_schedule, read.pipe_chunks)):
        problems.append(
            document.problem(("pipe_chunks",), wrong, "change it, or leave it out", "pipe-chunks")
        )
    return read, problems


def by_real_names(hyperparameters: Document) -> tuple[Document, list[Problem], list[Problem]]:
    """Read what is stated by the name of another library.

    Args:
        hyperparameters: One point, as written.

    Returns:
        It, with each such value also where the library reads it; names that are refused, and values that differ from
        those at the real name; a warning of each name that was taken as another.
    """
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for name in hyperparameters.data:
        if name in NOT_READ and not (
            name == "batch_size" and hyperparameters.get((TOTAL,)) not in (None, AUTO)
        ):
            message = "is not read by this library"
            problems.append(hyperparameters.problem((name,), message, NOT_READ[name], "other-name"))
        value = hyperparameters.data[name] if name in BY_OTHER_NAMES else None
        if value is None or value == AUTO:
            continue
        path = BY_OTHER_NAMES[name]
        stated, origin = stated_at(hyperparameters, path), hyperparameters.origin((name,))
        if stated is None:
            origin = origin if origin.startswith("--") else origin.reworded(f"{name}, {origin}")
            hyperparameters = hyperparameters.overwritten(path, value, origin)
            message, fix = f"is taken as {dotted(path)}", f"write {dotted(path)}"
            warnings.append(hyperparameters.problem((name,), message, fix, "other-name"))
        elif repr(stated) != repr(value):
            place = hyperparameters.origin(path)
            message = f"is another name of {dotted(path)}, which is {shown(stated)} ({place})"
            fix = f"keep {dotted(path)} only"
            problems.append(hyperparameters.problem((name,), message, fix, "other-name"))
    return hyperparameters, problems, warnings


def _not_a_number(document: Document, name: str) -> Iterator[Problem]:
    """A problem where a number that an optimizer is given is a text, or out of its range."""
    value = document.data[name]
    if isinstance(value, str) and value != AUTO:
        fix = type_fix(float, value)
        if exponent := re.fullmatch(r"([-+]?\d+)([eE][-+]?\d+)", value):
            fix = f"write {exponent[1]}.0{exponent[2]}: without quotes, and with a dot, as YAML 1.1 wants it"
        yield wrong_type(document, (name,), "a number", fix)
    elif isinstance(value, (int, float)) and value < 0:
        yield document.problem((name,), "must be 0 or more", "write 0 or more", "out-of-range")
    elif isinstance(value, (int, float)) and name in BELOW_ONE and not value < 1:
        yield document.problem((name,), "must be below 1", "write e.g. 0.9", "out-of-range")


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
    """Close by spelling and of the same length: "global_batchsize" is misspelt, "batch_size" a model's own name."""
    if key in BY_OTHER_NAMES:
        return False
    if key.replace("pipeline_", "pipe_") in OWN_KEYS:
        return True
    close = difflib.get_close_matches(key, OWN_KEYS, n=1, cutoff=0.85)
    return bool(close) and close[0] != "fit" and abs(len(close[0]) - len(key)) <= 2


# ------------------------------------------------------------------------------------------- kept checkpoints

STORAGE = "checkpoint_storage"


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """``checkpoint_storage.save_*`` of an experiment: how many checkpoints are kept when it ends.

    Source: ``RawSaveExperimentBest`` and its neighbours in determined 0.38.1's ``master/pkg/schemas/expconf``.
    """

    save_experiment_best: Count = option(0, "The best of all trials, by searcher.metric.")
    save_trial_best: Count = option(1, "The best of each trial.")
    save_trial_latest: Count = option(1, "The latest of each trial.")


def stated_policy(document: Document) -> SavePolicy | None:
    """What an experiment states, the rest as a master defaults it; None where it states nothing of it.

    Raises:
        ConfigError: a number that is none, or below 0; a misspelt name.
    """
    section = document.get((STORAGE,))
    if not isinstance(section, dict):
        return None
    known = SavePolicy.__dataclass_fields__
    problems = [
        unknown_key(document, (STORAGE, name), known)
        for name in section
        if str(name).startswith("save_") and name not in known
    ]
    stated = read_model(SavePolicy, document, (STORAGE,), problems)
    if problems:
        raise ConfigError(problems)
    return SavePolicy(**stated) if stated else None


def limit_problem(document: Document, total_limit: int | None) -> Problem | None:
    """A warning where ``fit.save_total_limit`` may delete, while training, what is to be kept at the end.

    Args:
        document: The experiment.
        total_limit: Of ``fit``.
    """
    try:
        policy = stated_policy(document)
    except ConfigError:
        return None
    if policy is None or total_limit is None:
        return None
    most = {"save_experiment_best": 1, "save_trial_best": 1, "save_trial_latest": total_limit}
    name = next((name for name, number in most.items() if getattr(policy, name) > number), None)
    if name is None:
        return None
    message = (
        f"may not be reached: hyperparameters.fit.save_total_limit {total_limit} deletes the oldest while training, "
        "all but the best and the newest"
    )
    fix = "leave save_total_limit out, or write a larger one"
    value = getattr(policy, name)
    return document.problem((STORAGE, name), message, fix, "save-limit", value=value)
