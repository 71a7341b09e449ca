"""The names that metrics have in every tool: ``training/loss``, ``validation/accuracy/top5``. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Number = int | float


def named(group: str, metrics: Mapping[str, Any]) -> dict[str, Number]:
    """Metrics of a group by their whole names; what is not a number is left out.

    Args:
        group: ``training``, ``validation`` or another.
        metrics: As they are reported: nested mappings and lists, of numbers, tensors or arrays.
    """
    return dict(_numbers(group, metrics))


def flattened(value: Mapping[str, Any], joint: str = ".") -> dict[str, Any]:
    """A nested mapping as one, e.g. ``deepspeed.zero_optimization.stage``; an empty mapping or list stays."""
    return dict(_leaves("", value, joint))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Number]]:
    if hasattr(value, "tolist"):  # of torch or numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}/{index}", item)
    elif isinstance(value, bool):
        yield name, int(value)
    elif isinstance(value, (int, float)):
        yield name, value


def _leaves(name: str, value: Any, joint: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}{joint}{key}" if name else str(key), item, joint)
    else:
        yield name, value
