"""Where the layers of a model are cut into the parts of a pipeline, by measured times or evenly."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Pipeline
from determined_ds.pipe.timeline import timeline

PARAMETERS, UNIFORM, MEASURED, BY_TYPE = "parameters", "uniform", "measured", "type:"
METHODS = (PARAMETERS, UNIFORM, MEASURED)
SIMULATED = 4  # micro-batches a rank of a simulated step, at most: with more, the same partition is best

Bounds = tuple[int, ...]  # where each part starts, and the number of layers
# In the run directory and in checkpoints, so that a run that resumes is cut as before.
NAME = "partition.json"


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """How long a micro-batch takes in a layer."""

    name: str  # of its class or function
    parameters: int  # that it trains
    forward_s: float  # seconds of its forward pass
    backward_s: float  # and of its backward pass, with what is computed again in it

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def method_problem(method: object) -> str:
    """Why layers cannot be shared out by a method; "" where they can."""
    if method in METHODS:
        return ""
    if not isinstance(method, str) or not method.startswith(BY_TYPE) or method == BY_TYPE:
        return f"must be {', '.join(METHODS)}, or type: and a regular expression of class names"
    pattern = method.removeprefix(BY_TYPE)
    if ":" in pattern or re.search(r"\\[A-Z]", pattern):
        return "has a colon or an upper-case escape, which DeepSpeed does not pass on"  # _partition_layers, 0.19.8
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return ""


def evenest(costs: Sequence[float], parts: int) -> Bounds:
    """The cut into contiguous parts, none of them empty, whose most expensive part is cheapest; exact.

    Args:
        costs: Of each layer, >= 0.
        parts: From 1 to the number of layers.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    cuts: dict[int, tuple[float, Bounds]] = {0: (0.0, (0,))}  # of so many layers: the dearest part, the cut
    for part in range(1, parts + 1):
        cuts = {
            end: min(
                (max(most, sums[end] - sums[start]), (*bounds, end))
                for start, (most, bounds) in cuts.items()
                if start < end
            )
            for end in range(part, len(sums))
        }
    return cuts[len(costs)][1]


def fastest(layers: Sequence[LayerTime], pipe: Pipeline) -> Bounds:
    """The cut of measured layers whose simulated step is shortest, found from the evenest one by moving bounds.

    Sending takes no time, and the two halves of a backward pass in two are assumed to take equally long. There are
    at least as many layers as the pipeline has parts.
    """
    few = replace(pipe, micro_batches=min(pipe.micro_batches, SIMULATED * pipe.ranks))

    def rated(bounds: Bounds) -> tuple[float, float, Bounds]:
        cuts = [layers[a:b] for a, b in itertools.pairwise(bounds)]
        forward = [sum(each.forward_s for each in part) for part in cuts]
        backward = [sum(each.backward_s for each in part) for part in cuts]
        halves = [each / 2 for each in backward]
        seconds = {FORWARD: forward, BACKWARD: backward, INPUT: halves, WEIGHT: halves}
        spans = timeline(few, lambda op: seconds[op.kind][op.part])
        return max(own[-1].end for own in spans), max(map(sum, zip(forward, backward, strict=True))), bounds

    best = rated(evenest([layer.seconds for layer in layers], pipe.parts))
    moves = [(index, by) for index in range(1, pipe.parts) for by in (-1, 1)]
    while True:  # one bound at a time; a part is never empty
        beside = []
        for at, by in moves:
            moved = (*best[2][:at], best[2][at] + by, *best[2][at + 1 :])
            if all(a < b for a, b in itertools.pairwise(moved)):
                beside.append(rated(moved))
        found = min(beside, default=best)
        if found[:2] >= best[:2]:
            return best[2]
        best = found


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition by measured times."""

    pipe: Pipeline  # the schedule that it is made for
    layers: tuple[LayerTime, ...]
    bounds: Bounds

    def text(self) -> str:
        """As a file holds it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_partition(text: str, names: Sequence[str], pipe: Pipeline) -> Partition | None:
    """What a file holds; None where that is no partition of layers of these names into the parts of a pipeline."""
    try:
        found = TypeAdapter(Partition).validate_json(text)
    except ValidationError:
        return None
    own = [layer.name for layer in found.layers], replace(found.pipe, micro_batches=pipe.micro_batches)
    return found if own == (list(names), pipe) else None
