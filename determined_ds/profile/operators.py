"""The operators that cost most, with the modules that they belong to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from determined_ds.profile.nesting import PHASES, Nested, StepsOf
from determined_ds.profile.trace_file import Event, Trace

MOST = 10
SHAPES = 3  # of an operator's inputs


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator in alike modules, e.g. ``aten::addmm`` in ``transformer.h.*.mlp.c_fc``.

    Args:
        name: Of the operator.
        module: Its module's name; ``*`` stands for the numbers in which alike modules differ; empty outside of modules.
        num_modules: How many those are.
        phase: One of :data:`~determined_ds.profile.nesting.PHASES`.
        seconds: Of a mean step, without the operators that it calls; on a GPU, of its kernels.
        share: Of the step.
        calls: In a mean step.
        shapes: Of its inputs, where most of its time goes, e.g. ``[2048, 128] [128, 512]``.
        costliest: The one of its modules that takes most; empty where there is one, or none.
    """

    name: str
    module: str
    num_modules: int
    phase: str
    seconds: float
    share: float
    calls: float
    shapes: str = ""
    costliest: str = ""


@dataclass
class _Sum:
    seconds: float = 0.0
    calls: int = 0
    by_shapes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_module: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, kw_only=True)
class OperatorCosts:
    """What the operators of a mean step cost.

    Args:
        costliest: Those that cost most, the costliest first.
        seconds_by_phase: Phase -> seconds of all operators.
    """

    costliest: Sequence[Operator] = ()
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)


def operator_costs(trace: Trace, operators: Sequence[Nested], most: int = MOST) -> OperatorCosts:
    """What the operators of the recorded steps cost.

    Args:
        trace: Of a rank.
        operators: Of the trace.
        most: How many are named.
    """
    steps = trace.steps
    sums: dict[tuple[str, str, str], _Sum] = defaultdict(_Sum)
    by_phase = dict.fromkeys(PHASES, 0.0)
    for place, seconds in _costs(trace, operators):
        found = sums[place.event.name, alike(place.module), place.phase]
        found.seconds += seconds
        found.calls += 1
        found.by_shapes[shapes_of(place.event)] += seconds
        found.by_module[place.module] += seconds
        by_phase[place.phase] += seconds / len(steps)
    steps_s = sum(step.end - step.begin for step in steps) / 1e6
    ordered = sorted(sums.items(), key=lambda item: -item[1].seconds)[:most]
    costliest = [_operator(key, found, len(steps), steps_s) for key, found in ordered]
    return OperatorCosts(costliest=costliest, seconds_by_phase=by_phase)


def _operator(key: tuple[str, str, str], found: _Sum, num_steps: int, steps_s: float) -> Operator:
    name, module, phase = key
    several = len(found.by_module) > 1
    return Operator(
        name=name,
        module=module,
        num_modules=len(found.by_module) if module else 0,
        phase=phase,
        seconds=found.seconds / num_steps,
        share=found.seconds / steps_s,
        calls=found.calls / num_steps,
        shapes=_largest(found.by_shapes),
        costliest=_largest(found.by_module) if several else "",
    )


def _largest(found: Mapping[str, float]) -> str:
    return max(found, key=lambda name: found[name])


def _costs(trace: Trace, operators: Sequence[Nested]) -> Iterator[tuple[Nested, float]]:
    """Each operator in the steps, with its seconds: its own, or on a GPU those of what it launched."""
    steps, on_device = StepsOf(trace.steps), _device_seconds(trace)
    for place in operators:
        if steps.index(place.event.begin) is None:
            continue
        if on_device is None:
            yield place, place.self_us / 1e6
        elif seconds := on_device.get(place.event.args.get("External id"), 0.0):
            yield place, seconds


def _device_seconds(trace: Trace) -> Mapping[object, float] | None:
    """On a GPU, External id of an operator -> seconds of what it launched; None on a CPU."""
    if not trace.device_events:
        return None
    found: dict[object, float] = defaultdict(float)
    for event in trace.device_events:
        found[event.args.get("External id")] += (event.end - event.begin) / 1e6
    return found


def alike(module: str) -> str:
    """A module's name with ``*`` for its numbers: ``transformer.h.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", module)


def shapes_of(event: Event) -> str:
    """The shapes of an operator's first tensors."""
    dims = event.args.get("Input Dims") or ()
    shapes = [str(shape) for shape in dims if shape and not isinstance(shape[0], list)]
    return " ".join(shapes[:SHAPES]) + (" …" if len(shapes) > SHAPES else "")
