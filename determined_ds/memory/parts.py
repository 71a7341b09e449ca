"""The layers of a pipeline, cut into the parts of its schedule; the parameters of a rank, and the bytes of a part."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from determined_ds.memory.model import LayerBytes, LayerShape
from determined_ds.pipe.bytes_held import PartBytes
from determined_ds.pipe.partition import BY_TYPE, UNIFORM, evenest


@lru_cache(maxsize=256)
def bounds(layers: tuple[LayerShape, ...], method: str, parts: int) -> tuple[int, ...]:
    """Where each part starts, and the number of layers: near where DeepSpeed cuts them.

    DeepSpeed takes the cut with the least difference between its heaviest and its lightest part, and this the one whose
    heaviest part is lightest. What ``measured`` times is not known here: it is taken for ``parameters``.

    Args:
        layers: Of the model.
        method: Of a ``PipelineTrial``: ``parameters``, ``uniform``, ``measured`` or ``type:REGEX``.
        parts: Of the pipeline.
    """
    method, items = method.lower(), len(layers)
    if items <= parts:
        return tuple(min(part, items) for part in range(parts + 1))
    if method == UNIFORM:
        each, more = divmod(items, parts)
        return tuple(part * each + min(part, more) for part in range(parts + 1))
    weights = [layer.num_trainable_parameters for layer in layers]
    if method.startswith(BY_TYPE):
        pattern = re.compile(method.removeprefix(BY_TYPE), re.IGNORECASE)
        weights = [int(bool(pattern.search(layer.name))) for layer in layers]
    return evenest(weights, parts)


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
    own = [layer.of(samples) for layer in layers]
    copy = own[0].inputs
    if recomputed:
        own = [_recomputed(own[at : at + recomputed]) for at in range(0, len(own), recomputed)]
    at = range(len(own))
    kept = [0, *itertools.accumulate(each.kept for each in own)]  # by the layers before each, and by all
    gradient = [*(each.outputs for each in own[:-1]), 0]  # of its outputs, made by the layer after it
    left = [sum(each.gradients for each in own[i + 1 :]) for i in at]  # by the layers after it
    # Outputs within the part are inputs of the next layer.
    in_two = sum(each.split for each in own) + sum(gradient)
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


def _recomputed(layers: Sequence[LayerBytes]) -> LayerBytes:
    """Of some layers only the outputs of the last one are kept; all is there again in the backward pass."""
    outputs, kept, backward, forward = layers[-1].outputs, 0, 0, 0
    for index, layer in enumerate(layers):
        after = layer.outputs if index < len(layers) - 1 else 0
        backward = max(backward, kept + layer.backward + after)
        forward = max(forward, layer.forward + (layers[index - 1].outputs if index else 0))
        kept += layer.kept
    most = max(backward, kept) + outputs
    return LayerBytes(
        outputs=outputs,
        kept=outputs,
        forward=forward,
        backward=most,
        split=outputs,
        gradients=outputs,
        input_pass=most,
        weight_pass=most,
    )
