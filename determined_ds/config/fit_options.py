"""``hyperparameters.fit``: the arguments of ``Trainer.fit``, and lengths and periods of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.config.numbers import LARGEST, number, optional_size, wrong_type
from determined_ds.config.profiled_steps import ProfiledSteps, read_profiled_steps
from determined_ds.documents.document import Document, KeyPath, one_of, unknown_key, unknown_keys
from determined_ds.documents.values import KINDS
from determined_ds.errors import Problem

CHECKPOINT_POLICIES = ("best", "all", "none")
WARM_STARTS = ("weights", "all")
CHOICES = {"checkpoint_policy": CHECKPOINT_POLICIES, "warm_start": WARM_STARTS}
UNITS = ("batches", "epochs")
TIME_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
# Why the others are not by the clock.
ONLY_COUNTED = {
    "max_length": "how much is trained would depend on the machine",
    "validation_period": "what is best, what a searcher stops and what a schedule does would differ from run to run",
    "reporting_period": "the metrics of two runs could not be compared",
}
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")


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


def read_fit(document: Document, problems: list[Problem]) -> FitOptions:
    """Read the section ``fit`` of hyperparameters; what is wrong is added to the problems, and taken as absent."""
    fit = document.get(("fit",))
    if fit is None:
        return FitOptions()
    if not isinstance(fit, dict):
        problems.append(
            wrong_type(document, ("fit",), "a mapping", "write e.g. fit: {max_length: {batches: 200}}")
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
            values[key] = optional_size(document, path, problems)
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
            problems.append(wrong_type(document, path, KINDS[bool], "write true or false"))
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
        problems.append(wrong_type(document, path, "a mapping with batches or epochs", fix))
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
    ((unit, value),) = given.items()
    here = (*path, unit)
    if unit in TIME_UNITS:
        return _duration(document, here, problems)
    if not isinstance(value, list) or name == "max_length":
        size = number(document, here, problems)
        return None if size is None else Length(unit=unit, value=size)
    if not value:
        problems.append(document.problem(here, "an empty schedule", "write e.g. [5, 30]", "out-of-range"))
        return None
    numbers = [number(document, (*here, index), problems) for index in range(len(value))]
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
        problems.append(wrong_type(document, path, "a number", "write e.g. {minutes: 15}"))
        return None
    if not 0 < value <= LARGEST:
        problems.append(
            document.problem(path, "must be more than 0", "write e.g. {minutes: 15}", "out-of-range")
        )
        return None
    return Duration(unit=str(path[-1]), value=value)
