"""What was measured: repetitions of variants, what follows from their numbers, and their file ``results.json``.

A number that a file holds is a field; one that follows from others is a property, and is nowhere written down. The
files are strict JSON: every key is known, every type right; a number that is not finite is a word.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from determined_ds.documents.document import dotted, refusal
from determined_ds.documents.files import write_files
from determined_ds.pipe.timeline import RecordedStep

FORMAT = 3  # of results.json: raised when its keys or their meaning change
MEASURED, FAILED, OUT_OF_MEMORY = "measured", "failed", "out of memory"
CANNOT_RUN, STOPPED = "cannot run", "stopped"
# Of those that were not measured, in a sentence.
RAN_OUT = {OUT_OF_MEMORY: "ran out of memory", FAILED: FAILED, CANNOT_RUN: CANNOT_RUN, STOPPED: "was stopped"}
WINDOW = 5  # steps that a loss is averaged over: one batch's loss alone says more of the batch
# Part of a step -> what it is. The order is that of tables and pictures.
PARTS = {
    "data": "waiting for the loader, moving batches to the device",
    "forward": "computing the forward pass",
    "backward": "computing the backward pass",
    "communication": "waiting for collectives: not hidden by computation",
    "optimizer": "computing the optimizer's step",
    "pipeline": "waiting for a neighbouring stage of the pipeline",
    "idle": "a GPU without work, while the host is not at one of the above",
    "other": "the rest: the loop, callbacks, what has no mark",
}
PROFILE_DIR, PROFILE_JSON = "profile", "profile.json"  # in a run directory; what was read from the traces

MAX_PROBLEMS = 3  # a damaged list has one at every number
AGAIN = "give a results.json as this version of det-ds writes it, or measure again"
_NUMBERS = re.compile(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]")  # a list of them; JSON's strings hold no line feed
_Loaded = TypeVar("_Loaded")
KNOWN_KEYS = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One fresh start of a variant."""

    __pydantic_config__ = KNOWN_KEYS

    run_dir: str  # relative to the results' folder
    step_seconds: tuple[float, ...]  # of each step after the warm-up
    losses: tuple[float, ...]  # of every step, the warm-up's too: means over the global batch
    warmup: int  # steps before step_seconds begins
    peak_memory_bytes_by_rank: tuple[int, ...]  # device memory on CUDA; resident memory on a CPU
    model_state_bytes_by_rank: tuple[int, ...]  # found in the engine, on the device
    bubble: float | None = None  # of a pipeline's time that its stages wait
    bubble_ideal: float | None = None  # the same by the schedule alone, counted
    pipeline_step: RecordedStep | None = None  # the median one: what each rank computed when


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant, over its repetitions. What follows from measurements is None where none was made."""

    __pydantic_config__ = KNOWN_KEYS

    name: str  # of the strategy or the variant, e.g. zero2
    slots: int
    status: str
    reason: str = ""  # one or two sentences where it was not measured
    engine: str | None = None  # deepspeed or ddp, seen on the engine itself
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None  # micro-batches of a step
    replicas: int | None = None
    pipe_parallel_size: int | None = None
    precision: str | None = None
    samples_per_step: int | None = None
    tokens_per_sample: int | None = None
    repetitions: tuple[Repetition, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Whether it takes part in comparisons: it ran to its end, and steps of it were timed."""
        return self.status == MEASURED and bool(self.step_seconds)

    @property
    def step_seconds(self) -> list[float]:
        """All timed steps of all repetitions."""
        return [seconds for each in self.repetitions for seconds in each.step_seconds]

    @property
    def median_step_seconds(self) -> float | None:
        """Over all timed steps of all repetitions."""
        return _median(self.step_seconds)

    @property
    def p95_step_seconds(self) -> float | None:
        """Of twenty steps, one takes longer: over all timed steps of all repetitions."""
        steps = self.step_seconds
        return statistics.quantiles(steps, n=20, method="inclusive")[-1] if len(steps) > 1 else _median(steps)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest of the repetitions' own median step times, in seconds."""
        medians = [statistics.median(each.step_seconds) for each in self.repetitions if each.step_seconds]
        return (min(medians), max(medians)) if medians else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """What the median step time lies between, in seconds: :attr:`spread`, or the quartiles of a single start."""
        if len(self.repetitions) == 1 and len(self.step_seconds) > 1:
            low, _, high = statistics.quantiles(self.step_seconds, n=4)
            return low, high
        return self.spread

    def joined(self, start: Row) -> Row:
        """This row with one more start of its variant. A failure decides: what fails once is not to be relied upon."""
        if start.status == STOPPED and self.repetitions:
            return self
        if start.status != MEASURED:
            once = f"in one of {len(self.repetitions) + 1} starts: " if self.repetitions else ""
            start = replace(start, reason=f"{once}{start.reason}")
        elif self.repetitions:  # one recorded step of a pipeline is enough
            more = (replace(each, pipeline_step=None) for each in start.repetitions)
            start = replace(self, repetitions=(*self.repetitions, *more))
        return start

    @property
    def samples_per_second(self) -> float | None:
        """Samples of a step over its median time."""
        return _ratio(self.samples_per_step, self.median_step_seconds)

    @property
    def samples_per_second_spread(self) -> tuple[float, float] | None:
        """Lowest and highest of the repetitions: :attr:`spread` as a throughput."""
        if self.spread is None or self.samples_per_step is None:
            return None
        return self.samples_per_step / self.spread[1], self.samples_per_step / self.spread[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Samples per second times the tokens of a sample."""
        return (self.samples_per_second or 0) * (self.tokens_per_sample or 0) or None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of the rank and the repetition that took most."""
        return max((size for r in self.repetitions for size in r.peak_memory_bytes_by_rank), default=None)

    @property
    def model_state_bytes(self) -> int | None:
        """Of the rank and the repetition that held most."""
        return max((size for r in self.repetitions for size in r.model_state_bytes_by_rank), default=None)

    @property
    def bubble(self) -> float | None:
        """Share of a pipeline's time that its stages wait: the median of the repetitions."""
        return _median([each.bubble for each in self.repetitions if each.bubble is not None])

    @property
    def bubble_ideal(self) -> float | None:
        """What the schedule alone costs, were all stages and micro-batches alike."""
        return next((each.bubble_ideal for each in self.repetitions if each.bubble_ideal is not None), None)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step from the first: the mean of the repetitions that came so far."""
        each = [repetition.losses for repetition in self.repetitions]
        longest = max(map(len, each), default=0)
        return tuple(_mean([one[step] for one in each if step < len(one)]) for step in range(longest))

    @property
    def loss(self) -> float | None:
        """The mean of the last :data:`WINDOW` losses; of all, where there are fewer."""
        return _mean(self.losses[-WINDOW:]) if self.losses else None

    @property
    def loss_curve(self) -> tuple[tuple[float, float], ...]:
        """(seconds, loss) as training goes: the mean of the last losses, each step at its median time.

        Its last point is :attr:`loss`. Starting up and warming up take longer than that, and are not in it.
        """
        losses, step = self.losses, self.median_step_seconds
        if not losses or step is None:
            return ()
        width = min(WINDOW, len(losses))
        return tuple((end * step, _mean(losses[end - width : end])) for end in range(width, len(losses) + 1))

    def seconds_to(self, loss: float | None) -> float | None:
        """Seconds of training until the mean of the last losses is at or below ``loss``; None if it never is."""
        return next((at for at, reached in self.loss_curve if loss is not None and reached <= loss), None)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All variants that were to be measured, those that could not be too."""

    __pydantic_config__ = KNOWN_KEYS

    title: str  # what was compared, e.g. the experiment's name
    command: str  # the command line, to do it again
    created: str  # in ISO 8601
    machine: str  # processors and what else ran on them, on one line
    accelerator: str  # cpu or cuda
    steps: int  # that each repetition was to time, after its warm-up
    rows: tuple[Row, ...]

    @property
    def measured(self) -> tuple[Row, ...]:
        """The rows that take part in comparisons."""
        return tuple(row for row in self.rows if row.is_measured)

    @property
    def first(self) -> Row | None:
        """What the others are compared with: the first row that was measured."""
        return next(iter(self.measured), None)

    @property
    def target_loss(self) -> float | None:
        """The highest finite loss that a measured row ended at, so that each of them reaches it; None without one."""
        losses = (row.loss for row in self.measured)
        return max((loss for loss in losses if loss is not None and math.isfinite(loss)), default=None)

    def against_first(self, row: Row) -> dict[str, float | None]:
        """A row beside the first one that was measured.

        ``samples_per_second`` and ``peak_memory_bytes`` are ratios, ``loss`` is a difference; each None where either
        row does not know it. Nothing for a row that was not measured.
        """
        first = self.first
        if first is None or not row.is_measured:
            return {}
        return {
            "samples_per_second": _ratio(row.samples_per_second, first.samples_per_second),
            "peak_memory_bytes": _ratio(row.peak_memory_bytes, first.peak_memory_bytes),
            "loss": None if row.loss is None or first.loss is None else row.loss - first.loss,
        }


def write_row(row: Row, path: Path) -> None:
    """Write a row by itself: what one start of a variant measured. A file that is there is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_files({path: text_of(row)}, overwrite=True)


def text_of(value: Row | Results) -> str:
    """The text of the file of a row, or of ``results.json``: strict JSON, the same for the same results."""
    data = {**_mark(type(value)), **json.loads(TypeAdapter(type(value)).dump_json(value))}
    text = json.dumps(data, indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def load_results(path: str | Path) -> Results:
    """Read ``results.json``, as ``det-ds compare`` writes it.

    Raises:
        ConfigError: the file cannot be read, is damaged, is another program's or of another format; with the keys
            at fault.
    """
    return read_file(Results, Path(path))


def read_file(cls: type[_Loaded], path: Path) -> _Loaded:
    """Read a row, or results. A ConfigError says why that cannot be done."""
    mark, why = _mark(cls), ""
    try:
        data = json.loads(path.read_bytes())
        if isinstance(data, dict) and {key: data.pop(key, None) for key in mark} == mark:
            return TypeAdapter(cls).validate_python(data)
        why = f"is not a file of {mark['kind']}, of format {mark['format']}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValidationError as refused:
        wrong = refused.errors(include_url=False)[:MAX_PROBLEMS]
        why = "; ".join(f"{dotted(tuple(map(str, each['loc'])))}: {each['msg']}" for each in wrong)
    except (ValueError, RecursionError) as error:  # a ValueError: of a path with a null byte in it, too
        why = f"is not JSON: {error}"
    raise refusal(str(path), why, AGAIN)


def _mark(cls: type[Any]) -> dict[str, Any]:
    """The first keys of its file, by which it is known."""
    kind = "results of determined_ds" if cls is Results else "a measurement of determined_ds"
    return {"kind": kind, "format": FORMAT}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float:
    """Plain sums: the like of fsum refuse what is not finite, and a loss may be."""
    return sum(values) / len(values)


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None
