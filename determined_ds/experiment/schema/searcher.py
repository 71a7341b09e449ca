"""``searcher``: how the space of the hyperparameters is searched, and by which metric.

Each kind is a model, and its ``name`` decides. What the master's schemas only want in the end (a metric, a
number of trials), once its defaults are in, is required here at once: nothing else could fill it in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from typing_extensions import Self

from determined_ds.documents.document import nearest
from determined_ds.documents.values import kind_of
from determined_ds.experiment.experiment import SEARCHERS
from determined_ds.experiment.schema.section import (
    Flag,
    Integer,
    Natural,
    Number,
    Positive,
    Section,
    Text,
    by_kind,
    by_value,
    fault,
)

USABLE = ", ".join(SEARCHERS)
# Refused by the master's code; its schemas still know them, so that old experiments can be read.
REMOVED = {
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "custom": "random",
    "sync_halving": "async_halving",
}
UNITS = ("batches", "records", "epochs")


class Duration(Section):
    """A length or a period: just one of its units."""

    batches: Natural = Field(default=0)
    records: Natural = Field(default=0)
    epochs: Natural = Field(default=0)

    @model_validator(mode="after")
    def one_unit(self) -> Self:
        if len(self.model_fields_set) != 1:
            given = " and ".join(sorted(self.model_fields_set)) or "none"
            message = f"must be given in one unit, and is in {given}"
            raise fault("invalid", message, "write one of {batches: N}, {records: N}, {epochs: N}")
        return self


class PositiveDuration(Duration):
    """A length of one at least."""

    batches: Positive = Field(default=1)
    records: Positive = Field(default=1)
    epochs: Positive = Field(default=1)


MaxLength = Annotated[
    Annotated[Natural, Tag("integer")] | Annotated[PositiveDuration, Tag("mapping")],
    by_kind("integer", "mapping", expected="an integer or {batches: N}", fix="write {batches: N}"),
]

Metric = Annotated[
    Text, Field(description="it names the validation metric to search by", examples=["validation_loss"])
]
MaxTrials = Annotated[Positive, Field(description="it is the number of trials to run", examples=[16])]
MaxTime = Annotated[
    Integer, Field(description="trials are stopped at that much of time_metric", examples=[1000])
]
TimeMetric = Annotated[
    Text, Field(description="it names the metric that max_time is in", examples=["batches"])
]
Divisor = Annotated[Number, Field(gt=1)]


class Searcher(Section):
    """What all have."""

    metric: Metric
    smaller_is_better: Flag | None = None
    source_trial_id: Integer | None = None
    source_checkpoint_uuid: Text | None = None


class Single(Searcher):
    name: Literal["single"]
    max_length: MaxLength | None = None


class Random(Searcher):
    name: Literal["random"]
    max_trials: MaxTrials
    max_concurrent_trials: Natural | None = None
    max_length: MaxLength | None = None


class Grid(Searcher):
    name: Literal["grid"]
    max_concurrent_trials: Natural | None = None
    max_length: MaxLength | None = None


class Halving(Searcher):
    """What the two that stop trials early have. ``max_time`` and ``time_metric`` the master's code demands."""

    max_trials: MaxTrials
    max_time: MaxTime
    time_metric: TimeMetric
    max_concurrent_trials: Natural | None = None
    divisor: Divisor | None = None
    stop_once: Flag | None = None


class AdaptiveASHA(Halving):
    name: Literal["adaptive_asha"]
    mode: Literal["aggressive", "standard", "conservative"] | None = None
    max_rungs: Positive | None = None
    bracket_rungs: list[Integer] | None = None
    max_length: MaxLength | None = None


class AsyncHalving(Halving):
    name: Literal["async_halving"]
    num_rungs: Annotated[Positive, Field(description="it is the number of rungs to stop at", examples=[3])]
    max_length: PositiveDuration | None = None


def _no_such(name: Any) -> Any:
    if not isinstance(name, str):
        raise fault("wrong-type", f"must be one of {USABLE}, not {kind_of(name)}", f"use one of {USABLE}")
    guess = nearest(name, SEARCHERS)
    hint = f"did you mean {guess!r}? " if guess else ""
    raise fault("searcher", "no such searcher", f"{hint}use one of {USABLE}")


Name = Annotated[
    Text,
    BeforeValidator(_no_such),
    Field(description="it says how hyperparameters are chosen", examples=["single"]),
]


class UnknownSearcher(Searcher):
    """Has no name, or none that is known: all that is known of any searcher may stand in it."""

    name: Name
    bracket_rungs: Any = None
    budget: Any = None
    divisor: Any = None
    max_concurrent_trials: Any = None
    max_length: Any = None
    max_rungs: Any = None
    max_time: Any = None
    max_trials: Any = None
    mode: Any = None
    num_rungs: Any = None
    stop_once: Any = None
    time_metric: Any = None
    train_stragglers: Any = None
    unit: Any = None


def _removed(name: str) -> str:
    message = f"the {name} searcher has been removed from Determined"
    raise fault("removed-key", message, f"use {REMOVED[name]}, or another of {USABLE}")


class RemovedSearcher(Section, extra="ignore"):
    """Its other fields are not worth a word before it is another searcher."""

    name: Annotated[str, BeforeValidator(_removed)]


AnySearcher = Annotated[
    Annotated[Single, Tag("single")]
    | Annotated[Random, Tag("random")]
    | Annotated[Grid, Tag("grid")]
    | Annotated[AdaptiveASHA, Tag("adaptive_asha")]
    | Annotated[AsyncHalving, Tag("async_halving")]
    | Annotated[RemovedSearcher, Tag("adaptive")]
    | Annotated[RemovedSearcher, Tag("adaptive_simple")]
    | Annotated[RemovedSearcher, Tag("custom")]
    | Annotated[RemovedSearcher, Tag("sync_halving")]
    | Annotated[UnknownSearcher, Tag("unknown")],
    by_value("name", *SEARCHERS, *REMOVED, otherwise="unknown"),
]
