"""``partition.json``: the times of a model's layers, and where they are cut by them. In the run directory and in
checkpoints, so that a run that resumes is cut as before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.partition import Bounds, LayerTime, rank_seconds

NAME = "partition.json"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition by measured times.

    Args:
        pipe: The schedule that it is made for.
        layers: Their times.
        bounds: Where each part starts, and the number of layers.
        by_parameters: Where ``partition_method: parameters`` would cut.
    """

    pipe: Pipeline
    layers: tuple[LayerTime, ...]
    bounds: Bounds
    by_parameters: Bounds

    def is_of(self, names: Sequence[str], pipe: Pipeline) -> bool:
        """Whether it is a partition of layers of these names into the parts of a pipeline."""
        own = (self.pipe.schedule, self.pipe.ranks, self.pipe.chunks)
        return self.times(names) is not None and own == (pipe.schedule, pipe.ranks, pipe.chunks)

    def times(self, names: Sequence[str]) -> tuple[LayerTime, ...] | None:
        """The times of the layers, if they have these names."""
        return self.layers if [layer.name for layer in self.layers] == list(names) else None

    def text(self) -> str:
        """As a file holds it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_partition(text: str) -> Partition | None:
    """What a file holds; None where it is of another kind."""
    try:
        found = json.loads(text)
        return Partition(
            pipe=Pipeline(**found["pipe"]),
            layers=tuple(LayerTime(**layer) for layer in found["layers"]),
            bounds=tuple(int(bound) for bound in found["bounds"]),
            by_parameters=tuple(int(bound) for bound in found["by_parameters"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def in_words(found: Partition) -> str:
    """A partition in a line: the layers of each part, and the slowest rank beside that by parameters."""
    sizes = "+".join(str(end - start) for start, end in itertools.pairwise(found.bounds))
    slowest, otherwise = (
        1000 * max(rank_seconds(found.layers, bounds, found.pipe))
        for bounds in (found.bounds, found.by_parameters)
    )
    return (
        f"{sizes} layers by their measured times; a micro-batch takes {slowest:.1f} ms on the slowest rank, and"
        f" {otherwise:.1f} ms by parameters"
    )
