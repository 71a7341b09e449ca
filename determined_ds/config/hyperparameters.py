"""The hyperparameters that this library reads, typed and checked. All others belong to the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from determined_ds.config.document import Document, KeyPath, nearest, unknown_key, unknown_keys
from determined_ds.config.findings import KINDS, kind_of, type_mend
from determined_ds.errors import ConfigError, Problem

LARGEST = 2**31 - 1
CHECKPOINT_POLICIES = ("best", "all", "none")


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
class FitOptions:
    """Arguments of ``Trainer.fit``, by the same names. None: as Determined defaults it.

    The last two are not Determined's: ``stop_on_nan`` stops a run at a loss that is not finite, and
    ``save_total_limit`` is the number of checkpoints to keep, the best and the newest always among them.
    """

    max_length: Length | None = None
    validation_period: Length | None = None
    checkpoint_period: Length | None = None
    reporting_period: Length | None = None
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    profiling_enabled: bool = False
    stop_on_nan: bool = True
    save_total_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the library reads of the hyperparameters; None or "auto" there is None here (derived)."""

    global_batch_size: int | None = None
    data_parallel_world_size: int | None = None
    pipe_parallel_size: int = 1
    model_parallel_size: int = 1
    deepspeed_config: str | dict[str, Any] | None = None
    overwrite_deepspeed_args: dict[str, Any] = field(default_factory=dict)
    torch_compile: bool = False
    sdpa_kernel: str | None = None
    fit: FitOptions = field(default_factory=FitOptions)


SIZES = ("global_batch_size", "data_parallel_world_size", "pipe_parallel_size", "model_parallel_size")
UNITS = ("batches", "epochs")
_UNITS = frozenset(UNITS)
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")
OWN_KEYS = (*SIZES, "deepspeed_config", "overwrite_deepspeed_args", "torch_compile", "sdpa_kernel", "fit")
SDPA_KERNELS = ("flash", "efficient", "cudnn", "math")  # of torch.nn.attention.SDPBackend


def parse_hyperparameters(document: Document) -> Hyperparameters:
    """Read the library's own hyperparameters out of all of them.

    Raises:
        ConfigError: every wrong type, size and name at once. A name that differs from one of the library's
            by a slip of the keyboard is refused too, since nobody would read it.
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
    for key in document.data:
        if key not in OWN_KEYS and _is_slip(key):
            problems.append(unknown_key(document, (key,), OWN_KEYS))
    ds_config = document.get(("deepspeed_config",))
    if ds_config is not None and not isinstance(ds_config, (str, dict)):
        mend = "write a path inside the context directory, or {type: const, val: {...}}"
        problems.append(_wrong(document, ("deepspeed_config",), "a path or a mapping", mend))
        ds_config = None
    overwrite = document.get(("overwrite_deepspeed_args",))
    if overwrite is not None and not isinstance(overwrite, dict):
        mend = "write e.g. overwrite_deepspeed_args: {zero_optimization: {stage: 2}}"
        problems.append(_wrong(document, ("overwrite_deepspeed_args",), "a mapping", mend))
        overwrite = None
    torch_compile = document.get(("torch_compile",))
    if isinstance(torch_compile, bool):
        values["torch_compile"] = torch_compile
    elif torch_compile is not None:
        problems.append(_wrong(document, ("torch_compile",), KINDS[bool], "write true or false"))
    kernel = document.get(("sdpa_kernel",))
    if kernel in SDPA_KERNELS:
        values["sdpa_kernel"] = kernel
    elif kernel not in (None, "auto"):
        mend = f"use one of {', '.join(SDPA_KERNELS)}, or leave it out"
        message = "is no attention kernel of torch's"
        problems.append(_problem(document, ("sdpa_kernel",), message, mend, "wrong-type"))
    values["fit"] = _fit(document, problems)
    read = Hyperparameters(
        **values, deepspeed_config=ds_config, overwrite_deepspeed_args=dict(overwrite or {})
    )
    return read, problems


@functools.lru_cache(maxsize=4096)
def _is_slip(key: str) -> bool:
    guess = nearest(key, OWN_KEYS)
    # Close by spelling and of the same length: "global_batchsize" is a slip, "batch_size" a model's own name.
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


def _problem(document: Document, path: KeyPath, message: str, mend: str, code: str) -> Problem:
    return Problem(
        key=document.key(path),
        value=document.get(path),
        origin=document.origin(path),
        message=message,
        mend=mend,
        code=code,
    )


def _wrong(document: Document, path: KeyPath, wanted: str, mend: str) -> Problem:
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return _problem(document, path, message, mend, "wrong-type")


def _size(document: Document, path: KeyPath, problems: list[Problem]) -> int | None:
    """An integer >= 1; None where it is absent or "auto"."""
    if document.get(path) in (None, "auto"):
        return None
    return _number(document, path, problems)


def _number(document: Document, path: KeyPath, problems: list[Problem]) -> int | None:
    value = document.get(path)
    if isinstance(value, bool) or not isinstance(value, int):
        problems.append(_wrong(document, path, KINDS[int], type_mend(int, value)))
        return None
    return _in_range(document, path, value, problems)


def _in_range(document: Document, path: KeyPath, value: int, problems: list[Problem]) -> int | None:
    if 1 <= value <= LARGEST:
        return value
    message = "must be 1 or more" if value < 1 else f"must be at most {LARGEST}"
    mend = "write a positive number" if value < 1 else "write a smaller number"
    problems.append(_problem(document, path, message, mend, "out-of-range"))
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
        elif key == "checkpoint_policy":
            if value in CHECKPOINT_POLICIES:
                values[key] = value
            else:
                mend = f"use one of {', '.join(CHECKPOINT_POLICIES)}"
                problems.append(_problem(document, path, "is no checkpoint policy", mend, "out-of-range"))
        elif isinstance(value, bool):
            values[key] = value
        else:
            problems.append(_wrong(document, path, KINDS[bool], "write true or false"))
    return FitOptions(**values)


def _length(document: Document, path: KeyPath, problems: list[Problem]) -> Length | None:
    """``{batches: 200}``, ``{epochs: 3}``, or a schedule ``{batches: [5, 30]}``."""
    value = document.get(path)
    form = "write {batches: N} or {epochs: N}"
    if not isinstance(value, dict):
        plain = isinstance(value, int) and not isinstance(value, bool) and value > 0
        mend = f"write {{batches: {value}}}" if plain else form
        problems.append(_wrong(document, path, "a mapping with batches or epochs", mend))
        return None
    unknown = [] if value.keys() <= _UNITS else list(unknown_keys(document, path, UNITS))
    if unknown:
        problems += unknown
        return None
    given = {unit: number for unit, number in value.items() if number is not None}
    if len(given) != 1:
        message = "gives both batches and epochs" if given else "gives neither batches nor epochs"
        mend = form
        if given:  # the one that was laid over the file is the one that is meant
            said = [unit for unit in given if document.origin((*path, unit)).startswith("--")]
            other = "batches" if said == ["epochs"] else "epochs"
            mend = f"keep one; --set {document.key(path)}.{other}=null takes the other away"
        problems.append(_problem(document, path, message, mend, "invalid"))
        return None
    ((unit, number),) = given.items()
    here = (*path, unit)
    if not isinstance(number, list) or path[-1] == "max_length":
        size = _number(document, here, problems)
        return None if size is None else Length(unit=unit, value=size)
    if not number:
        problems.append(_problem(document, here, "an empty schedule", "write e.g. [5, 30]", "out-of-range"))
        return None
    numbers = [_number(document, (*here, index), problems) for index in range(len(number))]
    return Length(unit=unit, value=tuple(sorted({size for size in numbers if size is not None})))
