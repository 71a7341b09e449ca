"""A ``PipelineModule`` whose rank holds several parts of the model.

Source: ``DualPipeVModule`` in deepspeed 0.19.8's ``runtime/pipe/dualpipev.py``, which does the same for two parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from determined_ds.config.layout import Topology
from determined_ds.pipe.orders import ONE_F_ONE_B, Pipeline
from determined_ds.pipe.partition import Bounds
from determined_ds.trial.seeded_module import SeededModule


def made_module(pipe: Pipeline, *, bounds: Bounds | None = None, **more: Any) -> PipelineModule:
    """The module of a schedule: DeepSpeed's own for 1F1B, and where there is one rank.

    Args:
        pipe: The schedule.
        bounds: Where to cut; None: as ``partition_method`` says.
        more: Arguments of ``PipelineModule``.
    """
    if pipe.schedule == ONE_F_ONE_B or pipe.ranks == 1:
        return CutModule(bounds=bounds, **more)
    return PlannedModule(pipe, bounds=bounds, **more)


def process_topology(layout: Topology) -> ProcessTopology:
    """DeepSpeed's form of a layout: which rank holds which stage of which replica."""
    names = ("pipe", "data", "model") if layout.model_parallel_size > 1 else ("pipe", "data")
    axes = {name: size for name, size in layout.axes.items() if name in names}
    return ProcessTopology(axes=list(axes), dims=list(axes.values()))


class CutModule(SeededModule):
    """A ``PipelineModule`` that is cut at given bounds, or by DeepSpeed's methods.

    Args:
        bounds: Where each part starts, and the number of layers; None: as ``partition_method`` says.
        more: Arguments of ``PipelineModule``.
    """

    def __init__(self, *, bounds: Bounds | None, **more: Any) -> None:
        object.__setattr__(self, "bounds", bounds)  # the module is built within the constructor of its base
        super().__init__(**more)

    def _partition_layers(self, method: str = "uniform") -> None:
        if self.bounds is None:
            super()._partition_layers(method)
        else:
            self.parts = list(self.bounds)
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class PlannedModule(CutModule):
    """A ``PipelineModule`` that is cut into the parts of a schedule, and holds those of its rank.

    Args:
        pipe: The schedule; its micro-batches do not matter here.
        more: Arguments of :class:`CutModule`.
    """

    def __init__(self, pipe: Pipeline, **more: Any) -> None:
        object.__setattr__(self, "pipe", pipe)  # the module is built within the constructor of its base
        super().__init__(**more)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.num_stages = self.pipe.parts
        super()._partition_layers(method)
        self.own_parts = [part for part in range(self.pipe.parts) if self.pipe.rank_of(part) == self.stage_id]
        self.active_part = self.own_parts[0]

    def stage_owner(self, layer_idx: int) -> int:
        return self.pipe.rank_of(super().stage_owner(layer_idx))

    def _build(self) -> None:
        self.functions: dict[int, list[Any]] = {}
        self.checkpointable: dict[int, list[bool]] = {part: [] for part in self.own_parts}
        for part in self.own_parts:
            self._set_bounds(self.parts[part], self.parts[part + 1])
            self.forward_funcs: list[Any] = []
            super()._build()
            self.functions[part] = self.forward_funcs
        self.activate(self.own_parts[0])

    def activate(self, part: int) -> None:
        """Make a part the one that ``forward`` computes."""
        self.active_part = part
        self.forward_funcs = self.functions[part]
        self.is_checkpointable_results = self.checkpointable[part]
        self._set_bounds(self.parts[part], self.parts[part + 1])

    def _precompute_checkpointable_values(self) -> None:
        for part in self.own_parts:
            self.activate(part)
            self.is_checkpointable_results_interval = None  # the base keeps what it found for one part
            super()._precompute_checkpointable_values()
            self.checkpointable[part] = self.is_checkpointable_results

    # ------------------------------------------------------------------------------------ what is done part by part

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Write the layers of this rank, as DeepSpeed's ``save_checkpoint`` has it."""
        for _ in self._each_part():
            super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        """Read the layers of this rank, as DeepSpeed's ``load_checkpoint`` has it."""
        for _ in self._each_part():
            super().load_state_dir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this rank."""
        for _ in self._each_part():
            super().compile(*args, **kwargs)

    def _each_part(self) -> Iterator[int]:
        for part in self.own_parts:
            self.activate(part)
            yield part
        self.activate(self.own_parts[0])
