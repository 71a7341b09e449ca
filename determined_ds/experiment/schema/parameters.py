"""``hyperparameters``: constants, nested mappings of them, and specs of what is searched.

The trap: every mapping with a key ``type`` is a spec to the master, an optimizer of a DeepSpeed JSON too. In
lists it ignores this, unless the search is a grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, RootModel, Tag, ValidationInfo, field_validator, model_validator

from determined_ds.documents.document import KeyPath
from determined_ds.experiment.schema.section import Integer, Number, Positive, Section, fault
from determined_ds.experiment.space.space import SPEC_TYPES, invalid_spec


class Constant(Section):
    type: Literal["const"]
    val: Annotated[Any, Field(description="a constant has a value", examples=[1])]


class Categorical(Section):
    type: Literal["categorical"]
    vals: Annotated[list[Any], Field(description="it lists the values to try", examples=["[1, 2]"])]


Minimum = Field(description="a range has two ends", examples=[1])
Maximum = Field(description="a range has two ends", examples=[10])


class Range(Section):
    """What the ranges have. ``count`` is the number of values that a grid takes of it."""

    count: Positive | None = None

    @field_validator("maxval", check_fields=False)
    @classmethod
    def above_minval(cls, value: Any, info: ValidationInfo) -> Any:
        minval = info.data.get("minval")
        if minval is not None and not minval < value:
            fix = f"write a number above {minval:g}, or a smaller minval"
            raise fault("out-of-range", f"must be more than minval, which is {minval:g}", fix)
        return value


class Int(Range):
    type: Literal["int"]
    minval: Annotated[Integer, Minimum]
    maxval: Annotated[Integer, Maximum]


class Double(Range):
    type: Literal["double"]
    minval: Annotated[Number, Minimum]
    maxval: Annotated[Number, Maximum]


class Log(Range):
    """``base ** minval`` to ``base ** maxval``."""

    type: Literal["log"]
    base: Annotated[Number, Field(gt=0, description="the range is of its powers", examples=[10])]
    minval: Annotated[Number, Minimum]
    maxval: Annotated[Number, Maximum]


class NoSpec(Section, extra="allow"):
    """A mapping that the master reads as a spec, though it is not a valid one."""

    type: Any = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, value: Any) -> Any:
        raise fault("hyperparameter-spec", *invalid_spec(value))


def _tag(value: Any) -> str:
    if not isinstance(value, dict):
        return "value"
    if "type" not in value:
        return "nested"
    kind = value["type"]
    return kind if isinstance(kind, str) and kind in SPEC_TYPES else "no-spec"


class Space(RootModel[dict[str, Any]]):
    """A mapping of hyperparameters."""

    root: dict[str, Hyperparameter]


Hyperparameter = Annotated[
    Annotated[Constant, Tag("const")]
    | Annotated[Categorical, Tag("categorical")]
    | Annotated[Int, Tag("int")]
    | Annotated[Double, Tag("double")]
    | Annotated[Log, Tag("log")]
    | Annotated[NoSpec, Tag("no-spec")]
    | Annotated[Space, Tag("nested")]
    | Annotated[Any, Tag("value")],
    Discriminator(_tag),
]
Space.model_rebuild(_types_namespace={"Hyperparameter": Hyperparameter})


def uncounted(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The ranges below ``path`` that lack the count which a grid needs; here lists are looked into too."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from uncounted(item, (*path, index))
    elif isinstance(value, dict) and "type" not in value:
        for key, item in value.items():
            yield from uncounted(item, (*path, key))
    elif isinstance(value, dict):
        kind = value["type"]
        if not isinstance(kind, str) or (kind in ("int", "double", "log") and value.get("count") is None):
            yield path
