"""A ``PipelineModule`` for any schedule of :mod:`determined_ds.pipe`, whose layers draw random numbers by their place.

A rank holds one part of the model or several; ``forward`` computes the one that is active.

Where a rank's layers draw from its one generator, dropout depends on how many ranks there are and in which order they
compute. Here each layer has a seed of its own in each pass (:func:`seed_of`). So any schedule on any number of ranks
trains as one process does, a pass that is computed anew draws the same again, and a resumed run too. First weights do
not depend on where the layers are cut. (DeepSpeed's ``seed_layers`` counts passes from the start of the process.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from determined_ds.pipe.orders import ONE_F_ONE_B, Pipeline
from determined_ds.pipe.partition import Bounds


def seed_of(*place: int) -> int:
    """The seed of torch's generators for the trial's seed and a layer that is built, or for its pass in training.

    A pass is placed by the trial's seed, replica, step (also one that fp16 skips), micro-batch and layer, from 0.
    """
    return hash(place) % 2**63  # of integers, the same in every process


class ScheduledModule(PipelineModule):
    """The parts of a rank.

    Args:
        pipe: The schedule; its micro-batches do not matter here. One rank has 1F1B, whatever is asked for.
        bounds: Where each part starts, and the number of layers; None: as ``partition_method`` says.
        more: Arguments of ``PipelineModule``.

    Attributes:
        is_planned: Whether the schedule is another than that of DeepSpeed's own engine.
        own_parts: Which parts of the model this rank holds.
        functions: Of each of them, its layers.
    """

    functions: dict[int, list[Any]]
    is_planned: bool
    seed_fn: Callable[[int], None] | None

    def __init__(self, pipe: Pipeline, *, bounds: Bounds | None = None, **more: Any) -> None:
        pipe = pipe if pipe.ranks > 1 else replace(pipe, schedule=ONE_F_ONE_B, chunks=1)
        # The module is built within the constructor of its base.
        self.__dict__.update(pipe=pipe, bounds=bounds, functions={}, checkpointable={}, seeds=None)
        self.__dict__["is_planned"] = pipe.schedule != ONE_F_ONE_B
        super().__init__(**more)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.num_stages = self.pipe.parts
        if self.bounds is None:
            super()._partition_layers(method)
        else:
            self.parts = list(self.bounds)
        self.own_parts = [part for part in range(self.pipe.parts) if self.pipe.rank_of(part) == self.stage_id]

    def stage_owner(self, layer_idx: int) -> int:
        return self.pipe.rank_of(super().stage_owner(layer_idx))

    def _build(self) -> None:
        self.seed_layers, self.seed_fn = True, self._seed_built
        with torch.random.fork_rng(_gpus()):
            for part in self.own_parts:
                self._set_bounds(self.parts[part], self.parts[part + 1])
                self.forward_funcs: list[Any] = []
                super()._build()
                self.functions[part], self.checkpointable[part] = self.forward_funcs, []
        self.seed_layers, self.seed_fn = False, None
        self.activate(self.own_parts[0])

    def _seed_built(self, number: int) -> None:
        """Seed a layer that is built, by ``base_seed`` plus its number; copies of a tied layer begin alike."""
        layer = number - self.base_seed
        if isinstance(spec := self._layer_specs[layer], TiedLayerSpec):
            layer = [getattr(each, "key", None) for each in self._layer_specs].index(spec.key)
        _seed(seed_of(self.base_seed, layer))

    def activate(self, part: int) -> None:
        """Make a part the one that ``forward`` computes."""
        self.forward_funcs = self.functions[part]
        self.is_checkpointable_results = self.checkpointable[part]
        self._set_bounds(self.parts[part], self.parts[part + 1])

    def _in_each_part(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        for part in self.own_parts:
            self.activate(part)
            method(*args, **kwargs)
        self.activate(self.own_parts[0])

    def _precompute_checkpointable_values(self) -> None:
        for part in self.own_parts:
            self.activate(part)
            self.is_checkpointable_results_interval = None  # the base keeps what it found for one part
            super()._precompute_checkpointable_values()
            self.checkpointable[part] = self.is_checkpointable_results
        self.activate(self.own_parts[0])

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().save_state_dict, *args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().load_state_dir, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().compile, *args, **kwargs)

    def forward(self, forward_input: Any) -> Any:
        if self.seeds is None or not self.training:
            return super().forward(forward_input)
        layers, first, interval = self.forward_funcs, self._local_start, self.activation_checkpoint_interval
        seed = self.seeds(first)

        def run(start: int, end: int, *inputs: Any) -> Any:
            outputs = inputs[0] if len(inputs) == 1 else inputs
            for index in range(start, end):
                _seed(seed(first + index))
                outputs = layers[index](outputs)
            return outputs

        # What else draws numbers draws them as if no layer had been seeded.
        with torch.random.fork_rng(_gpus()):
            if not interval:
                return run(0, len(layers), forward_input)
            outputs = forward_input
            blocks = zip(range(0, len(layers), interval), self.is_checkpointable_results, strict=True)
            for start, is_recomputed in blocks:
                block = partial(run, start, min(start + interval, len(layers)))
                inputs = outputs if isinstance(outputs, tuple) else (outputs,)
                outputs = self.activation_checkpoint_func(block, *inputs) if is_recomputed else block(*inputs)
            return outputs


def seed_layers(engines: Iterable[Any], seed: int, replica: int) -> None:
    """Have the layers of a trial's pipelines draw by their place in the training; other engines are left alone."""

    def of_engine(engine: Any) -> Callable[[int], Callable[[int], int]]:
        passes: Counter[int] = Counter()  # through each part since the step began
        began = -1

        def of_pass(first_layer: int) -> Callable[[int], int]:
            nonlocal began
            if (now := engine.global_steps) != began:
                began = now
                passes.clear()
            passes[first_layer] += 1  # each schedule has the micro-batches of a part in order
            return partial(seed_of, seed, replica, now, passes[first_layer] - 1)

        return of_pass

    for engine in engines:
        if isinstance(module := getattr(engine, "module", None), ScheduledModule):
            module.seeds = of_engine(engine)


def _seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    for gpu in _gpus():
        torch.cuda.default_generators[gpu].manual_seed(seed)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
