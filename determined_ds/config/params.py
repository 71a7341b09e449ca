"""The hyperparameters that this library reads: fields with type, default and meaning. All others belong to the model.

A model is a frozen dataclass. Of its fields the JSON Schema is made that its values are judged by, and the reference
page of the documentation. Every mistake is said at once.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from determined_ds.documents.document import Document, KeyPath, dotted, unknown_key, words
from determined_ds.documents.judging import Json, faults, problem_of
from determined_ds.documents.text import KINDS
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, chunks_problem
from determined_ds.pipe.partition import METHODS, method_problem

T = TypeVar("T")
AUTO = "auto"
LARGEST = 2**31 - 1


# ------------------------------------------------------------------------------------------- models


# A number between the least and the largest value, both included.
Size = Annotated[int, (1, LARGEST)]
Count = Annotated[int, (0, LARGEST)]


def option(default: Any, meaning: str, **about: Any) -> Any:
    """A field of a model.

    Args:
        default: Its default, or what makes it.
        meaning: In a sentence, for the reference page.
        about: ``choices``: the strings that it may be. ``fix``: what to say of a value at fault. ``schema``: of a field
            whose type does not say how it is written, and ``form``: the same in words. ``auto``: see :func:`derived`.
    """
    metadata = {"description": meaning, **about}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def derived(meaning: str, default: Any = None, **about: Any) -> Any:
    """A field of which "auto" is as if it were absent."""
    return option(default, meaning, auto=True, **about)


@functools.cache
def schema_of(hint: Any) -> Json:
    """The JSON Schema of a type; of a model that of a mapping of its fields, each of which may be null.

    Beside the judge's keywords it has ``model`` and ``reads``: what a sound mapping is made into.
    """
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints, properties = get_type_hints(hint, include_extras=True), {}
        for each in fields(hint):
            about = each.metadata
            by_type = Literal[about["choices"]] if "choices" in about else hints[each.name]
            node = {**(about.get("schema") or schema_of(by_type))}
            node["type"] = [*node["type"], "null"]
            if "enum" in node:
                node["enum"] = [*node["enum"], None]
            properties[each.name] = node | {key: about[key] for key in ("auto", "fix") if key in about}
        return {"type": ["object"], "properties": properties, "additionalProperties": False, "model": hint}
    if origin is Annotated:
        low, high = args[1]
        return {**schema_of(args[0]), "minimum": low, "maximum": high}
    if origin in (Union, types.UnionType):
        nodes = [schema_of(each) for each in args if each is not type(None)]
        merged = functools.reduce(lambda one, other: {**one, **other}, nodes)
        return {**merged, "type": [name for node in nodes for name in node["type"]]}
    if origin is Literal:
        return {"type": ["string"], "enum": [*args]}
    if origin is dict and args[1] is not Any:
        return {"type": ["object"], "additionalProperties": schema_of(args[1])}
    if origin is list:
        return {"type": ["array"], "items": schema_of(args[0])}
    name = next(name for name, (kind, _) in KINDS.items() if kind is (origin or hint))
    return {"type": [name], "exact": True} if hint is int else {"type": [name]}


def read_model(model: type[T], document: Document, path: KeyPath) -> tuple[T, list[Problem]]:
    """The fields of a model that are given and sound, all others at their defaults; and a problem for each at fault.

    Args:
        model: A dataclass of :func:`option` s.
        document: The hyperparameters.
        path: Of the mapping that holds the fields.
    """
    kind: Any = model
    read, problems = _read(schema_of(kind), document, path)
    return (model() if read is NOT_GIVEN else read), problems


# A key that is read elsewhere -> where.
ELSEWHERE = {"api_key": "set WANDB_API_KEY in the environment; revoke a key that was seen"}


def _read(schema: Json, document: Document, path: KeyPath) -> tuple[Any, list[Problem]]:
    """What stands at a path, as its schema reads it, and the problem of each place at fault in it."""
    value = document.get(path)
    broken = faults(schema, value, path)
    problems = [problem_of(document, fault, elsewhere=ELSEWHERE) for fault in broken.values()]
    return _made(schema, value, path, broken), problems


def _made(schema: Json, value: Any, path: KeyPath, broken: Mapping[KeyPath, Any]) -> Any:
    """A value without the places that are broken; ``NOT_GIVEN`` where that leaves the default."""
    if value is None or path in broken or (value == AUTO and "auto" in schema):
        return NOT_GIVEN
    if "model" in schema and isinstance(value, dict):
        known = schema["properties"]
        made = {
            name: _made(known[name], value[name], (*path, name), broken) for name in value if name in known
        }
        return schema["model"](**{name: each for name, each in made.items() if each is not NOT_GIVEN})
    if any(place[: len(path)] == path for place in broken):
        return NOT_GIVEN
    return schema["reads"](value) if "reads" in schema else value


# ------------------------------------------------------------------------------------------- fit

UNITS = ("batches", "epochs")
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
# Steps: a trace of GPT-2 takes megabytes a step on a disk, and a hundred times that in memory.
MOST_ACTIVE = 50


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


def _length(stated: dict[str, Any]) -> Length | Duration:
    """``{batches: 200}``, ``{epochs: 3}``, a schedule ``{batches: [5, 30]}``, or for checkpoints ``{minutes: 15}``."""
    [(unit, value)] = stated.items()
    if unit in TIME_UNITS:
        return Duration(unit=unit, value=value)
    return Length(unit=unit, value=tuple(sorted(set(value))) if isinstance(value, list) else value)


def _one_of(properties: Json, form: str) -> dict[str, Any]:
    """About a field that is a mapping with one of these keys."""
    schema = {"type": ["object"], "properties": properties, "additionalProperties": False, "reads": _length}
    return {
        "schema": {**schema, "minProperties": 1, "maxProperties": 1},
        "form": form,
        "fix": f"write {form}",
    }


# Lengths are counted, and not by the clock: else two runs could not be compared.
_COUNTED = "{batches: N} or {epochs: N}"
_SIZE = schema_of(Size)
_SIZES = {**_SIZE, "type": ["integer", "array"], "items": _SIZE, "minItems": 1}
_TIME = {"type": ["number"], "exclusiveMinimum": 0, "maximum": LARGEST}
LENGTH = _one_of(dict.fromkeys(UNITS, _SIZE), _COUNTED)
PERIOD = _one_of(dict.fromkeys(UNITS, _SIZES), _COUNTED)
CLOCK = _one_of(
    dict.fromkeys(UNITS, _SIZES) | dict.fromkeys(TIME_UNITS, _TIME),
    f"{_COUNTED}, or by the clock {{minutes: N}}",
)


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """Which steps of a process torch's profiler records, one after the other."""

    wait: Count = option(5, "Steps that are trained first, without the profiler.")
    warmup: Count = option(2, "Steps with the profiler on and nothing recorded: its first steps are slower.")
    active: Annotated[int, (1, MOST_ACTIVE)] = option(3, "Steps that are recorded.", fix="write 3 to 10")

    @property
    def total(self) -> int:
        """Steps until all are recorded."""
        return self.wait + self.warmup + self.active


@dataclass(frozen=True, kw_only=True)
class OnSpike:
    """When a step counts as a spike, and what is done then."""

    window: Annotated[int, (10, LARGEST)] = option(
        100, "Steps before a step that its loss and gradient norm are compared with."
    )
    deviations: float = option(
        8.0,
        "How far above their median, in robust standard deviations (1.4826 MAD), is a spike.",
        schema={"type": ["number"], "exclusiveMinimum": 0, "maximum": LARGEST},
        form="a number above 0",
    )
    skip: Size = option(20, "Batches of the data around a spike that are left out.")
    at_most: Count = option(3, "Spikes that are taken back; the next one ends the run.")


def skipped_ranges(stated: Any) -> tuple[tuple[int, int], ...]:
    """``fit.skip_batches``, ``[120, 139]`` or a list of such pairs, as ranges in order that do not touch.

    Raises:
        ValueError: something in it is not the first and the last of some batches.
    """
    pairs = [stated] if stated and all(isinstance(each, int) for each in stated) else stated
    found: list[tuple[int, int]] = []
    for pair in sorted(tuple(each) if isinstance(each, list) else (each,) for each in pairs):
        if len(pair) != 2 or pair[0] > pair[1]:
            raise ValueError(", ".join(map(str, pair)))
        if found and pair[0] <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(pair[1], found[-1][1]))
        else:
            found.append(pair)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Arguments of ``Trainer.fit``, by the same names. None: as Determined defaults it."""

    max_length: Length | None = option(None, "How long to train.", **LENGTH)
    validation_period: Length | None = option(
        None, "How often to validate; or a list, after each number.", **PERIOD
    )
    checkpoint_period: Length | Duration | None = option(
        None, "How often to write a checkpoint; a list of numbers writes one after each of them.", **CLOCK
    )
    reporting_period: Length | None = option(None, "How often to report training metrics.", **PERIOD)
    checkpoint_policy: Literal["best", "all", "none"] = option(
        "best", "Write a checkpoint after a validation only if it is the best so far, always, or never."
    )
    step_zero_validation: bool = option(False, "Validate once before the first step.")
    profiling_enabled: bool = option(False, "Report the use of the machine to Determined's profiler.")
    stop_on_nan: bool = option(True, "Stop the run at a loss that is not finite.")
    save_total_limit: Size | None = derived(
        "Checkpoints to keep while training, whatever checkpoint_storage says; the best and the newest always stay."
    )
    warm_start: Literal["weights", "all"] = option(
        "weights", "What is taken of the searcher's checkpoint: the weights, or all that the engine holds."
    )
    asynchronous_checkpoints: bool | None = option(
        None, "Continue training while a checkpoint is written; by default where that is worth it."
    )
    profile: ProfiledSteps | None = option(None, "Record some steps by torch's profiler.")
    on_out_of_memory: Literal["shrink", "stop"] = option(
        "shrink",
        "Out of GPU memory: start again with half the micro-batch and the same global batch, or stop.",
    )
    on_spike: OnSpike | None = option(
        None,
        "At a loss or a gradient norm that spikes: go back to a checkpoint before it, and leave out the batches.",
    )
    skip_batches: list[Any] | None = option(
        None,
        "Batches of the data that are not trained on: [FIRST, LAST], counted from 1, or a list of such pairs.",
        schema={**_SIZES, "type": ["array"], "items": _SIZES},
        form="[FIRST, LAST], or a list of such pairs",
    )


# ------------------------------------------------------------------------------------------- logging

LOGGING = "logging"
Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """Options of ``wandb.init``; for others there are W&B's environment variables."""

    project: str | None = option(None, "The project that the run appears in.")
    entity: str | None = option(None, "The user or the team that owns the project.")
    name: str | None = option(None, "The name of the run; by default that of the experiment.")
    tags: list[str] | None = option(None, "Tags for filtering.")
    mode: Literal["online", "offline", "disabled"] | None = option(None, "Where the run is sent to.")


@dataclass(frozen=True, kw_only=True)
class MlflowOptions:
    """Where MLflow stores a run, and as what."""

    tracking_uri: str | None = option(None, "The server; without one, a folder of the run.")
    experiment_name: str | None = option(None, "The experiment that the run appears in.")
    run_name: str | None = option(None, "The name of the run; by default that of the experiment.")
    tags: dict[str, Scalar] | None = option(None, "Tags of the run.")


@dataclass(frozen=True, kw_only=True)
class Loggers:
    """The tools; each is a mapping of options, ``true`` for none of them, or ``false``."""

    wandb: WandbOptions | bool | None = option(None, "Report the run to Weights & Biases.")
    mlflow: MlflowOptions | bool | None = option(None, "Report the run to MLflow.")


class Tool(NamedTuple):
    """A tool that a run can be reported to; its client is imported by the tool's own name."""

    title: str  # what people call it
    package: str  # what pip installs; an extra of this package has the name of the tool
    fix: str  # what to try where it does not take a run


TOOLS: Mapping[str, Tool] = {
    "wandb": Tool(
        title="Weights & Biases",
        package="wandb",
        fix="run `wandb login`, or set WANDB_API_KEY; without a network, write wandb: {mode: offline}",
    ),
    "mlflow": Tool(
        title="MLflow",
        package="mlflow-skinny",
        fix="see that the server of tracking_uri (MLFLOW_TRACKING_URI) answers from this machine",
    ),
}


def read_loggers(document: Document) -> dict[str, dict[str, Any]]:
    """The tools of ``logging`` in hyperparameters, each with its options, as far as these are sound."""
    if document.get((LOGGING,)) is None:  # asked of every point
        return {}
    stated, tools = read_model(Loggers, document, (LOGGING,))[0], {}
    for name in TOOLS:
        if options := getattr(stated, name):
            given = {} if options is True else vars(options)
            tools[name] = {key: value for key, value in given.items() if value is not None}
    return tools


def lost_on_cluster(document: Document, variables: str) -> list[Problem]:
    """A warning where neither hyperparameters nor variables give MLflow a server: its file ends with a container."""
    options, name = read_loggers(document).get("mlflow"), "MLFLOW_TRACKING_URI"
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

    global_batch_size: Size | None = derived("Samples of an optimizer step, all replicas (train_batch_size).")
    data_parallel_world_size: Size | None = derived(
        "Replicas of the model; by default the slots over the other sizes."
    )
    pipe_parallel_size: Size = derived("Stages of a pipeline that the model's layers are cut into.", 1)
    model_parallel_size: Size = derived("Ranks that share each layer by tensor parallelism.", 1)
    sequence_parallel_size: Size = derived("Ranks that share each sequence by Ulysses.", 1)
    deepspeed_config: str | dict[str, Any] | None = option(
        None,
        "The DeepSpeed JSON: a path inside the context directory, or the mapping itself.",
        fix="write a path inside the context directory, or {type: const, val: {...}}",
    )
    overwrite_deepspeed_args: dict[str, Any] = option(
        dict, "Values that are written over the DeepSpeed JSON, leaf by leaf."
    )
    zero_stage: Annotated[int, (0, 3)] | None = derived("ZeRO stage; overwrites zero_optimization.stage.")
    micro_batch_size: Size | None = derived(
        "Samples of a forward pass of one replica; overwrites train_micro_batch_size_per_gpu."
    )
    torch_compile: bool = option(False, "Compile the model by torch.compile.")
    pipe_schedule: str = derived(
        "The order in which a pipeline's ranks compute.", ONE_F_ONE_B, choices=SCHEDULES
    )
    pipe_chunks: Size | None = derived(
        "Parts of the model on each rank of a pipeline, for schedules with several."
    )
    partition_method: str | None = derived(
        "How a pipeline's layers are divided among its stages.",
        form=f"one of {', '.join(METHODS)}, or type:REGEX",
    )
    pipe_within_machine: bool = option(False, "Place a pipeline's stages on neighbouring ranks of a machine.")
    expert_parallel_size: Size | None = derived(
        "Ranks that DeepSpeed's AutoEP divides a mixture's experts over."
    )
    fit: FitOptions = option(
        FitOptions, "Arguments of Trainer.fit.", fix="write e.g. fit: {max_length: {batches: 200}}"
    )
    trial_seed: Count | None = derived("The seed of the trial, instead of the one that a searcher draws.")
    logging: Loggers = option(
        Loggers,
        "Tools that the run is reported to, each with its options.",
        fix="write logging: {wandb: {project: x}}",
    )

    @property
    def shorthands(self) -> dict[str, int]:
        """Those of :data:`SHORTHANDS` that are stated."""
        return {name: value for name in SHORTHANDS if (value := getattr(self, name)) is not None}


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
_OFFLOAD = f"write it below {OVERWRITES}.zero_optimization: {{device: cpu}}"
NOT_READ: dict[str, str] = {
    "batch_size": "write global_batch_size (samples of an optimizer step, all replicas); if batch_size is the model's"
    " own, state global_batch_size beside it",
    "slots_per_trial": "write resources.slots_per_trial, beside hyperparameters",
    "ds_config": "write deepspeed_config: the path of the JSON in the context directory",
    "zero_optimization": f"write it below {OVERWRITES}",
    **dict.fromkeys(("offload_optimizer", "offload_param"), _OFFLOAD),
}
# Numbers of the model's that fill the DeepSpeed JSON, or a trial's own optimizer: none is a text, none is negative.
_NUMBER = {"type": ["number", "array", "null"], "minimum": 0, "auto": True}
_NUMBERS_OF_MODELS = words("""learning_rate lr warmup_min_lr warmup_max_lr warmup_num_steps warmup_steps total_num_steps
    weight_decay eps adam_epsilon gradient_clipping max_grad_norm""")
NUMBERS = {
    **dict.fromkeys(_NUMBERS_OF_MODELS, _NUMBER),
    **{name: {**_NUMBER, "exclusiveMaximum": 1} for name in ("adam_beta1", "adam_beta2")},
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
    schemas, values = _schemas(), dict[str, Any]()
    problems = list[Problem]()
    for name in document.data:
        if name in schemas:
            value, found = _read(schemas[name], document, (name,))
            problems += found
            if value is not NOT_GIVEN and name in OWN_KEYS:
                values[name] = value
        elif _is_misspelt(name):
            problems.append(unknown_key(document, (name,), OWN_KEYS))
    read = Hyperparameters(**values)

    def add(path: KeyPath, message: str, fix: str, code: str) -> None:
        problems.append(document.problem(path, message, fix, code))

    if read.partition_method and (wrong := method_problem(read.partition_method)):
        fix = f"write {', '.join(METHODS)} or e.g. type:Block, or leave it out"
        add(("partition_method",), wrong, fix, "partition-method")
    if read.pipe_chunks is not None and (wrong := chunks_problem(read.pipe_schedule, read.pipe_chunks)):
        add(("pipe_chunks",), wrong, "change it, or leave it out", "pipe-chunks")
    for name, value in read.shorthands.items():
        over: KeyPath = (OVERWRITES, *SHORTHANDS[name])
        stated = stated_at(document, over)
        if stated is not None and (stated != value or isinstance(stated, bool)):
            message = f"differs from {dotted(over)} = {shown(stated)} ({document.origin(over)})"
            add((name,), message, f"keep one of them: {name} stands for {dotted(over)}", "stated-twice")
    steps, length, spikes = read.fit.profile, read.fit.max_length, read.fit.on_spike
    num_batches = length.value if length and length.unit == "batches" else None
    if spikes and isinstance(num_batches, int) and spikes.window >= num_batches:
        message = (
            f"is longer than the training: fit.max_length is {num_batches}, so no step would be compared"
        )
        add(
            ("fit", "on_spike", "window"),
            message,
            f"lower it, e.g. to {max(10, num_batches // 4)}",
            "out-of-range",
        )
    try:
        reached = num_batches if isinstance(num_batches, int) else None
        for first, last in skipped_ranges(read.fit.skip_batches or ()):
            if reached is not None and first > reached:
                message = (
                    f"{first} to {last} are never reached: the training ends with batch {reached} of the data"
                )
                add(("fit", "skip_batches"), message, "name earlier batches, or train more", "out-of-range")
            elif reached is not None:
                reached += last - first + 1
    except ValueError as error:
        message = f"{error}: must be the first and the last of the batches, the first not after the last"
        add(("fit", "skip_batches"), message, "write [120, 139], or [[120, 139], [400, 419]]", "out-of-range")
    if steps and isinstance(num_batches, int) and steps.total > num_batches:
        message = f"needs {steps.total} batches (wait + warmup + active), and fit.max_length is {num_batches}"
        add(("fit", "profile"), message, "train more, or lower wait or active", "out-of-range")
    return read, problems


@functools.cache
def _schemas() -> dict[str, Json]:
    """Of each hyperparameter that is judged: those of the library, and numbers of the model's."""
    return {**schema_of(Hyperparameters)["properties"], **NUMBERS}


def by_real_names(hyperparameters: Document) -> tuple[Document, list[Problem], list[Problem]]:
    """Read what is stated by the name of another library.

    Args:
        hyperparameters: One point, as written.

    Returns:
        It, with each such value also where the library reads it; names that are refused; a warning of each that was
        taken as another.
    """
    found: dict[bool, list[Problem]] = {True: [], False: []}  # refused, warned of

    def add(name: str, message: str, fix: str, *, is_refused: bool = True) -> None:
        found[is_refused].append(hyperparameters.problem((name,), message, fix, "other-name"))

    for name in list(hyperparameters.data):
        if name in NOT_READ and not (
            name == "batch_size" and stated_at(hyperparameters, (TOTAL,)) is not None
        ):
            add(name, "is not read by this library", NOT_READ[name])
        value = hyperparameters.data[name] if name in BY_OTHER_NAMES else None
        if value is None or value == AUTO:
            continue
        path, origin = BY_OTHER_NAMES[name], hyperparameters.origin((name,))
        stated = stated_at(hyperparameters, path)
        if stated is None:
            origin = origin if origin.startswith("--") else origin.reworded(f"{name}, {origin}")
            hyperparameters = hyperparameters.overwritten((path, value, origin))
            add(name, f"is taken as {dotted(path)}", f"write {dotted(path)}", is_refused=False)
        elif repr(stated) != repr(value):
            place = hyperparameters.origin(path)
            message = f"is another name of {dotted(path)}, which is {shown(stated)} ({place})"
            add(name, message, f"keep {dotted(path)} only")
    return hyperparameters, found[True], found[False]


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
