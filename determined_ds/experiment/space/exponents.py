"""``log`` hyperparameters whose bounds look like values: Determined takes them for exponents of the base.

Source: ``sampleOne`` in determined 0.38.1's ``master/pkg/searcher/hyperparameters.go``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from determined_ds.documents.document import Document, words
from determined_ds.documents.values import Findings
from determined_ds.errors import Problem
from determined_ds.experiment.space.space import Axis, read_space

# A part of the name of a hyperparameter that is below 1.
BELOW_ONE = words("lr rate decay dropout eps epsilon")
NOT_BELOW_ONE = words("sample sampling frame frames bit")  # their rates


def exponents(axes: Iterable[Axis], document: Document) -> list[Problem]:
    """A warning for each ``log`` hyperparameter whose bounds are probably the intended values.

    Args:
        axes: Of the search space.
        document: The experiment.
    """
    return [_warning(axis, document) for axis in axes if axis.kind == "log" and _looks_like_values(axis)]


def exponents_in(config: Mapping[str, Any]) -> list[Problem]:
    """The same, of the plain configuration of an experiment, as a master hands it to a trial."""
    document = Document(name="the experiment", data=dict(config))
    hyperparameters = config.get("hyperparameters")
    read = hyperparameters if isinstance(hyperparameters, dict) else {}
    space, _ = read_space(Findings(document), read, searcher="random")
    return exponents(space.axes, document)


def _looks_like_values(axis: Axis) -> bool:
    """Whether bounds are values between 0 and 1, or draw values of 1 and more for what is below 1."""
    base, low, high = (float(axis.spec[key]) for key in ("base", "minval", "maxval"))
    if base <= 1:
        return False
    if 0 < low < high < 1:
        return True
    parts = set(str(axis.path[-1]).lower().split("_"))
    return bool(parts & BELOW_ONE) and not parts & NOT_BELOW_ONE and base**high > 1


def _warning(axis: Axis, document: Document) -> Problem:
    base, low, high = (float(axis.spec[key]) for key in ("base", "minval", "maxval"))
    path = ("hyperparameters", *axis.path)
    fix = "write the exponents of the intended values: minval: -4 and maxval: -2 are 0.0001 and 0.01"
    if 0 < low < high <= 1:
        powers = [math.log(value, base) for value in (low, high)]
        fix = (
            f"for {low:g} to {high:g} write their exponents: minval: {powers[0]:.4g}, maxval: {powers[1]:.4g}"
        )
    elif low >= 1:
        fix = f"for {base**-high:g} to {base**-low:g} write minval: {-high:g}, maxval: {-low:g}"
    drawn = f"values from {base**low:g} to {base**high:g} are drawn"
    message = f"minval and maxval are exponents of the base: {drawn}"
    return document.problem(path, message, fix, "log-bounds", value=dict(axis.spec))
