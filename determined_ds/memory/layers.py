"""The layers of a pipeline as they were measured, cut into the parts of a schedule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from determined_ds.pipe.bytes_held import PartBytes


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes that grow with the samples of a micro-batch.

    Args:
        fixed: Those that do not.
        per_sample: Of each sample.
    """

    fixed: int = 0
    per_sample: int = 0

    def of(self, samples: int) -> int:
        """Of so many samples."""
        return self.fixed + samples * self.per_sample

    def times(self, by: int, over: int) -> Bytes:
        """With samples that are longer by ``by / over``."""
        return replace(self, per_sample=self.per_sample * by // over)


NOTHING = Bytes()


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer of a pipeline; bytes are of a micro-batch, as in :class:`PartBytes`.

    Args:
        name: Of its class or function.
        num_parameters: All of them.
        num_trainable_parameters: Those with a gradient.
        tied_key: Layers of one key share all their parameters; "" of a layer by itself.
        inputs: What it takes.
        outputs: What it hands on.
        kept: From its forward to its backward pass; with its outputs, unless only the loss takes them.
        unsaved: Outputs that only the loss takes, as far as neither saves them.
        forward: At the peak of its forward pass.
        backward: At the peak of its backward pass, beside the gradient of its outputs.
        split: Between the passes for its inputs and for its weights, where a backward pass is in two, its outputs not
            counted.
        gradients: What the pass for the inputs leaves for the other one.
        input_pass: At the peak of the one, as ``backward``.
        weight_pass: At the peak of the other.
    """

    name: str
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    tied_key: str = ""
    inputs: Bytes = NOTHING
    outputs: Bytes = NOTHING
    kept: Bytes = NOTHING
    unsaved: Bytes = NOTHING
    forward: Bytes = NOTHING
    backward: Bytes = NOTHING
    split: Bytes = NOTHING
    gradients: Bytes = NOTHING
    input_pass: Bytes = NOTHING
    weight_pass: Bytes = NOTHING

    def longer(self, by: int, over: int) -> LayerShape:
        """The same layer with samples that are longer by ``by / over``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {name: v.times(by, over) for name, v in values.items() if isinstance(v, Bytes)}
        return LayerShape(**values)


@lru_cache(maxsize=256)
def bounds(layers: tuple[LayerShape, ...], method: str, parts: int) -> tuple[int, ...]:
    """Where each part starts, and the number of layers; as DeepSpeed cuts them.

    What ``measured`` times is not known here: it is taken for ``parameters``.

    Args:
        layers: Of the model.
        method: Of a ``PipelineTrial``: ``parameters``, ``uniform``, ``measured`` or ``type:REGEX``.
        parts: Of the pipeline.

    Source: ``PipelineModule._partition_layers`` in deepspeed 0.19.8's runtime/pipe/module.py, and ``partition_uniform``
    and ``partition_balanced`` in its runtime/utils.py.
    """
    method = method.lower()
    if method == "uniform" or len(layers) <= parts:
        return _uniform(len(layers), parts)
    weights = [layer.num_trainable_parameters for layer in layers]
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        weights = [int(bool(pattern.search(layer.name))) for layer in layers]
    return _least_spread(weights, parts)


def _uniform(items: int, parts: int) -> tuple[int, ...]:
    if items <= parts:
        return tuple(min(part, items) for part in range(parts + 1))
    each, more = divmod(items, parts)
    return tuple(part * each + min(part, more) for part in range(parts + 1))


def _least_spread(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """The cut with the least difference between its heaviest and its lightest part; of equals, the one cut last."""
    sums = [0, *itertools.accumulate(weights)]
    nothing = float("inf")
    best: list[tuple[float, float, float]] = [(0, 0, nothing)] + [(nothing, nothing, nothing)] * len(weights)
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        found = [(nothing, nothing, nothing)] * len(sums)
        starts.append([0] * len(sums))
        for end in range(part, len(sums)):
            for start in range(end):
                _, most, least = best[start]
                own = sums[end] - sums[start]
                most, least = max(most, own), min(least, own)
                if found[end][0] >= most - least:
                    found[end], starts[-1][end] = (most - least, most, least), start
        best = found
    cut = [len(weights)]
    for chosen in reversed(starts):
        cut.append(chosen[cut[-1]])
    return tuple(reversed(cut))


def rank_parameters(layers: Sequence[LayerShape]) -> tuple[int, int]:
    """(parameters, trainable ones) of a rank's layers; what layers of one key share is there once."""
    own = {layer.tied_key or str(index): layer for index, layer in enumerate(layers)}.values()
    return sum(each.num_parameters for each in own), sum(each.num_trainable_parameters for each in own)


def part_bytes(
    layers: Sequence[LayerShape], samples: int, *, recomputed: int = 0, waits_for_nothing: bool = False
) -> PartBytes:
    """Bytes of a micro-batch in a part.

    Args:
        layers: Of the part; it may have none.
        samples: Of a micro-batch.
        recomputed: Layers that are computed again together in the backward pass; 0: none.
        waits_for_nothing: It is the first part, whose inputs have no gradient: all of its backward pass is for weights.
    """
    if not layers:
        return PartBytes()
    own = [_Segment.of_layer(layer, samples) for layer in layers]
    if recomputed:
        own = [_recomputed(own[at : at + recomputed]) for at in range(0, len(own), recomputed)]
    copy, at = layers[0].inputs.of(samples), range(len(own))
    kept = [0, *itertools.accumulate(each.kept for each in own)]  # by the layers before each, and by all
    gradient = [*(each.outputs for each in own[:-1]), 0]  # of its outputs, made by the layer after it
    left = [*itertools.accumulate((each.gradients for each in reversed(own[1:])), initial=0)][
        ::-1
    ]  # by those after it
    in_two = sum(each.split for each in own) + sum(
        gradient
    )  # outputs within the part are inputs of the next layer
    found = PartBytes(
        inputs=copy,
        kept=copy + kept[-1],
        forward=copy + max(kept[i] + own[i].forward for i in at),
        backward=copy + max(kept[i] + own[i].backward + gradient[i] for i in at),
        split=copy + in_two,
        input_pass=copy + kept[-1] + max(own[i].input_pass - own[i].kept + gradient[i] + left[i] for i in at),
        weight_pass=copy + in_two + max(0, *(each.weight_pass - each.split for each in own)),
        outputs=own[-1].outputs,
        unsaved=own[-1].unsaved,
    )
    if not waits_for_nothing:
        return found
    waiting = found.kept + found.outputs  # with their gradient
    return replace(found, split=waiting, input_pass=waiting, weight_pass=found.backward + found.outputs)


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A layer, or several that are computed again together, with the bytes of a micro-batch."""

    outputs: int
    kept: int
    unsaved: int
    forward: int
    backward: int
    split: int
    gradients: int
    input_pass: int
    weight_pass: int

    @classmethod
    def of_layer(cls, layer: LayerShape, samples: int) -> _Segment:
        return cls(**{name: getattr(layer, name).of(samples) for name in cls.__dataclass_fields__})


def _recomputed(layers: Sequence[_Segment]) -> _Segment:
    """Of some layers only the outputs of the last one are kept; all is there again in the backward pass."""
    outputs, kept, backward, forward = layers[-1].outputs, 0, 0, 0
    for index, layer in enumerate(layers):
        after = layer.outputs if index < len(layers) - 1 else 0
        backward = max(backward, kept + layer.backward + after)
        forward = max(forward, layer.forward + (layers[index - 1].outputs if index else 0))
        kept += layer.kept
    most = max(backward, kept) + outputs
    return _Segment(
        outputs=outputs,
        kept=outputs,
        unsaved=0,
        forward=forward,
        backward=most,
        split=outputs,
        gradients=outputs,
        input_pass=most,
        weight_pass=most,
    )
