"""The hyperparameters that this library reads: fields with type, default and meaning. All others belong to the model.

A model is a frozen dataclass; the reference page of the documentation is made of them. A value that is plainly of its
field's type is taken; every other one is judged by pydantic, which is imported only then, since its import takes a
third of a whole ``det-ds check``. What pydantic finds is said in our own words, every problem at once.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from determined_ds.documents.document import (
    Document,
    KeyPath,
    dotted,
    one_of,
    unknown_key,
    unknown_keys,
    words,
)
from determined_ds.documents.text import KINDS, kind_of, type_fix
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, chunks_problem
from determined_ds.pipe.partition import METHODS, method_problem

AUTO = "auto"
LARGEST = 2**31 - 1


# ------------------------------------------------------------------------------------------- models


class Range(NamedTuple):
    """The least and the largest value of a number, both included."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "ge": self.low, "le": self.high}


Size = Annotated[int, Range(1, LARGEST)]
Count = Annotated[int, Range(0, LARGEST)]


def option(default: Any, meaning: str, **about: Any) -> Any:
    """A field of a model.

    Args:
        default: Its default, or what makes it.
        meaning: In a sentence, for the reference page.
        about: ``auto``: "auto" is as if it were absent. ``choices``: the strings that it may be. ``form``: how it is
            written, where a reader of its own reads it. ``wanted`` and ``fix``: what to say of a value at fault, where
            its type does not say it.
    """
    metadata = {"description": meaning, **about}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def _options(model: type) -> dict[str, Any]:
    """Of each field that is read by its type alone: the type, its test and the rest."""
    found, hints = {}, get_type_hints(model, include_extras=True)
    for each in fields(model):
        if "form" not in each.metadata:
            choices = each.metadata.get("choices")
            hint = Literal[choices] if choices else hints[each.name]
            found[each.name] = (hint, _plain_test(hint), each.metadata)
    return found


@functools.cache
def _plain_test(hint: Any) -> Callable[[Any], bool]:
    """What tells that a value is of a type, for most of the good ones."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin is Annotated:
        is_plain, (allowed,) = _plain_test(args[0]), args[1:]
        return lambda value: is_plain(value) and allowed.low <= value <= allowed.high
    if origin in (Union, types.UnionType):
        tests = [_plain_test(each) for each in args if each is not type(None)]
        return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in args
    if origin in (list, dict):
        is_plain = _plain_test(args[-1])
        return lambda value: (
            type(value) is origin and all(map(is_plain, value.values() if origin is dict else value))
        )
    return lambda value: type(value) is hint


def read_model(model: type, document: Document, path: KeyPath, problems: list[Problem]) -> dict[str, Any]:
    """The fields of a model that are given and sound.

    A field that is null is as absent, and so is one that is "auto", where that means something.

    Args:
        model: A dataclass of :func:`option` s.
        document: The hyperparameters.
        path: Of the mapping that holds the fields; () for the whole document.
        problems: One is added for each value at fault.
    """
    section: dict[str, Any] = document.get(path)
    values: dict[str, Any] = {}
    options = _options(model)
    for name in section:  # other values are not looked at: a check of a search records what a decision reads
        value = section[name] if name in options else None
        if value is None:
            continue
        hint, is_plain, about = options[name]
        if is_plain(value):
            values[name] = value
        elif not (value == AUTO and "auto" in about):
            found = read_value(hint, document, (*path, name), problems, about)
            values |= {} if found is None else {name: found}
    return values


def read_value(
    hint: Any, document: Document, path: KeyPath, problems: list[Problem], about: Mapping[str, Any]
) -> Any:
    """The value at a path, if it is of a type; else None, and a problem is added."""
    value = document.get(path)
    if _plain_test(hint)(value):
        return value
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
    kind, limits = error["type"], error.get("ctx", {})
    if isinstance(value, (dict, list)) and error["loc"]:  # of a value in it, or a type that it might be
        step = error["loc"][0]
        if step in (value if isinstance(value, dict) else range(len(value))):
            path = (*path, step)
    code = "out-of-range"
    if kind == "greater_than_equal":
        message = f"must be {limits['ge']} or more"
        fix = "write a positive number" if limits["ge"] == 1 else f"write {limits['ge']} or more"
    elif kind == "less_than_equal":
        message, fix = f"must be at most {limits['le']}", about.get("fix", "write a smaller number")
    elif kind == "literal_error":
        choices = next((each for each in get_args(hint) if get_origin(each) is Literal), hint)
        message = f"is not a valid {str(path[-1]).replace('_', ' ')}"
        fix, code = one_of(get_args(choices), value), code if path[:-1] else "wrong-type"
    else:
        named = {"int": int, "bool": bool, "string": str, "dict": dict, "list": list, "float": float}
        wanted = named.get(kind.removesuffix("_type"), str)
        fix = about.get("fix") or type_fix(wanted, document.get(path))
        problems.append(wrong_type(document, path, about.get("wanted", KINDS[wanted]), fix))
        return None
    problems.append(document.problem(path, message, fix, code))
    return None


def wrong_type(document: Document, path: KeyPath, wanted: str, fix: str) -> Problem:
    """The problem of a value of another type than is wanted."""
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return document.problem(path, message, fix, "wrong-type")


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
# Steps: a trace of GPT-2 takes megabytes a step on a disk, and a hundred times that in memory.
MOST_ACTIVE = 50
_COUNTED = "{batches: N} or {epochs: N}"


@dataclass(frozen=True, kw_only=True)
class Length:
    """A length or a period of training, in ``batches`` or ``epochs``; of a schedule, all numbers at which it is due."""

    unit: str
    value: int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A period by the clock, in ``seconds``, ``minutes`` or ``hours``."""

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
    value, name = document.get(path), str(path[-1])
    by_clock = name not in ONLY_COUNTED
    units = (*UNITS, *TIME_UNITS) if by_clock else UNITS
    form = f"write {_COUNTED}{', or by the clock {minutes: N}' if by_clock else ''}"
    if not isinstance(value, dict):
        fix = f"write {{batches: {value}}}" if type(value) is int and value > 0 else form
        problems.append(wrong_type(document, path, "a mapping with batches or epochs", fix))
        return None
    if not by_clock and (clock := next((unit for unit in value if unit in TIME_UNITS), None)):
        message = f"cannot be in {clock}: {ONLY_COUNTED[name]}"
        problems.append(document.problem((*path, clock), message, form))
        return None
    given = sorted((unit for unit in units if value.get(unit) is not None), key=units.index)
    if unknown := list(unknown_keys(document, path, units)):
        problems += unknown
    elif not given:
        problems.append(document.problem(path, "gives neither batches nor epochs", form))
    elif len(given) > 1:
        problems.append(document.problem(path, f"gives both {' and '.join(given)}", "keep one"))
    elif given[0] in TIME_UNITS:
        here, number, example = (*path, given[0]), value[given[0]], "write e.g. {minutes: 15}"
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            problems.append(wrong_type(document, here, "a number", example))
        elif not 0 < number <= LARGEST:
            problems.append(document.problem(here, "must be more than 0", example, "out-of-range"))
        else:
            return Duration(unit=given[0], value=number)
    else:
        here, number = (*path, given[0]), value[given[0]]
        if name == "max_length" or not isinstance(number, list):
            size = read_value(Size, document, here, problems, {})
            return None if size is None else Length(unit=given[0], value=size)
        found = [read_value(Size, document, (*here, index), problems, {}) for index in range(len(number))]
        if not number:
            problems.append(document.problem(here, "an empty schedule", "write e.g. [5, 30]", "out-of-range"))
        elif None not in found:
            return Length(unit=given[0], value=tuple(sorted(set(found))))
    return None


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


# ------------------------------------------------------------------------------------------- logging

LOGGING = "logging"
# An option that would be a secret: it is stored with the configuration, and everyone who sees the experiment sees it.
SECRET = re.compile(r"(?:.*_)?(?:key|token|password|passwd|secret|credentials?)", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
WANDB_KEY = re.compile(r"wandb_v\d_\w{20,}")  # an older one, 40 hexadecimal digits, may as well be a commit
Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """Options of ``wandb.init``."""

    project: str | None = option(None, "The project that the run appears in.")
    entity: str | None = option(None, "The user or the team that owns the project.")
    name: str | None = option(None, "The name of the run; by default that of the experiment.")
    group: str | None = option(None, "The group that the run is shown in.")
    job_type: str | None = option(None, "The kind of the run, for filtering.")
    notes: str | None = option(None, "A description of the run.")
    tags: list[str] | None = option(None, "Tags for filtering.")
    mode: Literal["online", "offline", "disabled"] | None = option(None, "Where the run is sent to.")
    dir: str | None = option(None, "The folder of the client's own files.")


@dataclass(frozen=True, kw_only=True)
class MlflowOptions:
    """Where MLflow stores a run, and as what."""

    tracking_uri: str | None = option(None, "The server; without one, a folder of the run.")
    experiment_name: str | None = option(None, "The experiment that the run appears in.")
    run_name: str | None = option(None, "The name of the run; by default that of the experiment.")
    tags: dict[str, Scalar] | None = option(None, "Tags of the run.", fix="write e.g. tags: {team: vision}")


@dataclass(frozen=True, kw_only=True)
class Loggers:
    """The tools; each is a mapping of options, ``true`` for none of them, or ``false``."""

    wandb: WandbOptions | None = option(None, "Report the run to Weights & Biases.", form="mapping")
    mlflow: MlflowOptions | None = option(None, "Report the run to MLflow.", form="mapping")


class Tool(NamedTuple):
    """A tool that a run can be reported to; its client is imported by the tool's own name."""

    title: str  # what people call it
    options: type  # the model of those that may be stated
    package: str  # what pip installs; an extra of this package has the name of the tool
    secret: str  # the environment variable of its key or password
    fix: str  # what to try where it does not take a run


TOOLS: Mapping[str, Tool] = {
    "wandb": Tool(
        title="Weights & Biases",
        options=WandbOptions,
        package="wandb",
        secret="WANDB_API_KEY",
        fix="run `wandb login`, or set WANDB_API_KEY; without a network, write wandb: {mode: offline}",
    ),
    "mlflow": Tool(
        title="MLflow",
        options=MlflowOptions,
        package="mlflow-skinny",
        secret="MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        fix="see that the server of tracking_uri (MLFLOW_TRACKING_URI) answers from this machine",
    ),
}


def read_loggers(document: Document, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The tools of ``logging`` in hyperparameters, each with its options. Every mistake is added to ``problems``."""
    stated = document.get((LOGGING,))
    if not isinstance(stated, dict):
        if stated is not None:
            fix = f"write {LOGGING}: {{wandb: {{project: x}}}}"
            problems.append(wrong_type(document, (LOGGING,), "a mapping of tools", fix))
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, options in stated.items():
        path, tool = (LOGGING, name), TOOLS.get(name)
        if tool is None:
            problems.append(unknown_key(document, path, TOOLS))
        elif options is True:
            found[name] = {}
        elif isinstance(options, dict):
            known_here = [each.name for each in fields(tool.options)]
            secrets = [key for key, value in options.items() if is_secret_option(key, value)]
            for key in secrets:
                message = "is a secret, and everyone who sees the experiment could read it"
                fix = f"remove it, and set {tool.secret} in the environment; revoke a key that was seen"
                problems.append(document.problem((*path, key), message, fix, "logger-secret", value="***"))
            others = [key for key in options if key not in known_here and key not in secrets]
            problems += [unknown_key(document, (*path, key), known_here) for key in others]
            without = document.overwritten_all(((*path, key), None, "") for key in secrets)
            found[name] = read_model(tool.options, without if secrets else document, path, problems)
        elif options is not False:
            fix = f"write {name}: {{}}, or false"
            problems.append(wrong_type(document, path, "a mapping of options", fix))
    return found


def is_secret_option(name: Any, value: Any) -> bool:
    """Whether an option of a tool is its key or password, which is refused."""
    if not isinstance(value, str):
        return False
    is_key = WANDB_KEY.fullmatch(value) or PASSWORD_IN_URL.search(value)
    return bool(is_key) or SECRET.fullmatch(str(name)) is not None


def lost_on_cluster(document: Document, variables: str) -> list[Problem]:
    """A warning where MLflow is given no server: what it writes lies in a container, and ends with it.

    Args:
        document: The hyperparameters.
        variables: The experiment's environment variables, as a text.
    """
    options, name = read_loggers(document, []).get("mlflow"), "MLFLOW_TRACKING_URI"
    if options is None or "tracking_uri" in options or name in variables:
        return []
    message = f"has no tracking_uri: unless the image sets {name}, the run is in a file of the container"
    fix = "write mlflow: {tracking_uri: http://HOST:5000}"
    return [document.problem((LOGGING, "mlflow"), message, fix, "logger-server", value=NOT_GIVEN)]


# ------------------------------------------------------------------------------------------- all of them

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
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size_per_gpu"), ("micro_batch_size",)),
    "gradient_accumulation_steps": (OVERWRITES, "gradient_accumulation_steps"),
    "bf16": (OVERWRITES, "bf16", "enabled"),
    "fp16": (OVERWRITES, "fp16", "enabled"),
}
# A name that is not read, though it suggests so -> the fix.
NOT_READ: dict[str, str] = {
    "batch_size": "write global_batch_size (samples of an optimizer step, all replicas); if batch_size is the model's"
    " own, state global_batch_size beside it",
    "slots_per_trial": "write resources.slots_per_trial, beside hyperparameters",
    "ds_config": "write deepspeed_config: the path of the JSON in the context directory",
    "zero_optimization": f"write {OVERWRITES}: {{zero_optimization: {{...}}}}",
    **{
        name: f"write {OVERWRITES}: {{zero_optimization: {{{name}: {{device: cpu}}}}}}"
        for name in ("offload_optimizer", "offload_param")
    },
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
    for name in list(
        hyperparameters.data
    ):  # other values are not looked at: a check of a search records what is read
        if name in NOT_READ and not (
            name == "batch_size" and stated_at(hyperparameters, (TOTAL,)) is not None
        ):
            message = "is not read by this library"
            problems.append(hyperparameters.problem((name,), message, NOT_READ[name], "other-name"))
        value = hyperparameters.data[name] if name in BY_OTHER_NAMES else None
        if value is None or value == AUTO:
            continue
        path, origin = BY_OTHER_NAMES[name], hyperparameters.origin((name,))
        stated = stated_at(hyperparameters, path)
        if stated is None:
            origin = origin if origin.startswith("--") else origin.reworded(f"{name}, {origin}")
            hyperparameters = hyperparameters.overwritten(path, value, origin)
            message, fix = f"is taken as {dotted(path)}", f"write {dotted(path)}"
            warnings.append(hyperparameters.problem((name,), message, fix, "other-name"))
        elif repr(stated) != repr(value):
            place, fix = hyperparameters.origin(path), f"keep {dotted(path)} only"
            message = f"is another name of {dotted(path)}, which is {shown(stated)} ({place})"
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


def limit_problem(document: Document, total_limit: int | None) -> Problem | None:
    """A warning where ``fit.save_total_limit`` may delete, while training, what is to be kept at the end.

    Args:
        document: The experiment.
        total_limit: Of ``fit``.
    """
    if total_limit is None:
        return None
    for name, most in {
        "save_experiment_best": 1,
        "save_trial_best": 1,
        "save_trial_latest": total_limit,
    }.items():
        value = document.get(path := ("checkpoint_storage", name))
        if type(value) is int and value > most:
            message = (
                f"may not be reached: fit.save_total_limit {total_limit} deletes the oldest while training"
            )
            return document.problem(path, message, "leave save_total_limit out, or raise it", "save-limit")
    return None
