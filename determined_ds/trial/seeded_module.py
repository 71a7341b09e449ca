"""A ``PipelineModule`` whose layers draw random numbers by their place in the training, not by the order of passes.

Where a rank's layers draw from its one generator, dropout depends on how many ranks there are and in which order they
compute; and two stages, which begin with one seed, draw the same numbers. Here each layer has a seed of its own in each
pass. So any schedule on any number of ranks trains as one process does that seeds its layers alike
(:func:`layer_seed`), a pass that is computed anew draws the same again, and a resumed run too. First weights are
drawn in the same way: they do not depend on where the layers are cut.

DeepSpeed 0.19.8 has ``seed_layers``. Layers are built by it; in training it counts passes from the start of the
process, and layers from the start of what is recomputed together. Source: ``PipelineModule._build`` and ``forward`` in
its ``runtime/pipe/module.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec


def layer_seed(seed: int, replica: int, step: int, micro_batch: int, layer: int) -> int:
    """The seed of torch's generators before a layer's forward pass in training.

    Args:
        seed: Of the trial.
        replica: From 0.
        step: Optimizer steps taken before, those included that fp16 skipped.
        micro_batch: Of the step and the replica, from 0.
        layer: Of ``build_layers``, from 0.
    """
    return hash((seed, replica, step, micro_batch, layer)) % 2**63  # of integers, the same in every process


@dataclass
class LayerSeeds:
    """The seeds of the layers of a rank.

    Args:
        seed: Of the trial.
        replica: Of the rank, from 0.
        step: Returns the optimizer steps taken.
    """

    seed: int
    replica: int
    step: Callable[[], int]
    _step: int = -1
    _passes: Counter[int] = field(default_factory=Counter)

    def of_pass(self, first_layer: int) -> Callable[[int], int]:
        """The seed by the layer, for the next pass through a part; each schedule has its micro-batches in order."""
        if (step := self.step()) != self._step:
            self._step, self._passes = step, Counter()
        self._passes[first_layer] += 1
        return partial(layer_seed, self.seed, self.replica, step, self._passes[first_layer] - 1)


class SeededModule(PipelineModule):
    """A ``PipelineModule`` whose layers are each built under a seed, of ``base_seed`` and the layer's number.

    They are seeded in training once :func:`seed_layers` is called.
    """

    seeds: LayerSeeds | None = None
    seed_fn: Callable[[int], None] | None

    def _build(self) -> None:
        with torch.random.fork_rng(_gpus()):
            self.seed_layers, self.seed_fn = True, self._seed_built
            super()._build()
        self.seed_layers, self.seed_fn = False, None

    def _seed_built(self, number: int) -> None:
        """Seed a layer that is built; copies of a tied layer on several ranks begin alike.

        Args:
            number: ``base_seed`` and the layer's number, added by DeepSpeed.
        """
        layer = number - self.base_seed
        if isinstance(spec := self._layer_specs[layer], TiedLayerSpec):
            keys = [getattr(each, "key", None) for each in self._layer_specs]
            layer = keys.index(spec.key)
        _seed(hash((self.base_seed, layer)) % 2**63)

    def forward(self, forward_input: Any) -> Any:
        if self.seeds is None or not self.training:
            return super().forward(forward_input)
        layers, first = self.forward_funcs, self._local_start
        seed_of = self.seeds.of_pass(first)
        with torch.random.fork_rng(
            _gpus()
        ):  # what else draws numbers draws them as if no layer had been seeded
            interval = self.activation_checkpoint_interval
            if not interval:
                return _run(layers, first, seed_of, forward_input)
            outputs = forward_input
            blocks = zip(range(0, len(layers), interval), self.is_checkpointable_results, strict=True)
            for start, is_recomputed in blocks:
                block = partial(_run, layers[start : start + interval], first + start, seed_of)
                inputs = outputs if isinstance(outputs, tuple) else (outputs,)
                outputs = self.activation_checkpoint_func(block, *inputs) if is_recomputed else block(*inputs)
            return outputs


def seed_layers(engines: Iterable[Any], seed: int, replica: int) -> None:
    """Have the layers of pipelines draw by their place in the training.

    Args:
        engines: Those with another kind of module are left alone.
        seed: Of the trial.
        replica: Of this rank, from 0.
    """
    for engine in engines:
        if isinstance(module := getattr(engine, "module", None), SeededModule):
            module.seeds = LayerSeeds(seed, replica, partial(getattr, engine, "global_steps"))


def _run(layers: Sequence[Any], first: int, seed_of: Callable[[int], int], *inputs: Any) -> Any:
    outputs = inputs[0] if len(inputs) == 1 else inputs
    for index, layer in enumerate(layers, first):
        _seed(seed_of(index))
        outputs = layer(outputs)
    return outputs


def _seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    for gpu in _gpus():
        torch.cuda.default_generators[gpu].manual_seed(seed)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
