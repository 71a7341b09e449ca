"""Which tensors of a checkpoint are which of a Hugging Face model's: by exact names, less one prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from determined_ds.errors import ConfigError, Problem

NUM_SHOWN = 5
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The tensors of a Hugging Face model.

    Args:
        shapes: Name -> shape, of tied weights under their first name alone.
        tied: First name of a tied weight -> its other names.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The tensors of a checkpoint.

    Args:
        shapes: Name -> shape.
        others: Other name of one of them -> its name in ``shapes``.
    """

    shapes: Mapping[str, Shape]
    others: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """The key in ``shapes`` of any name."""
        found = self.others.get(name, name)
        return found if found in self.shapes else None


@dataclass(frozen=True, kw_only=True)
class Matched:
    """What is what.

    Args:
        names: Name in the Hugging Face model -> name in the checkpoint.
        copies: Name in the Hugging Face model -> further tensors of the checkpoint that it ties to that one.
    """

    names: Mapping[str, str]
    copies: Mapping[str, tuple[str, ...]]


def match(expected: Expected, stored: Stored, *, kind: str) -> Matched:
    """Find each tensor of a Hugging Face model in a checkpoint.

    Args:
        expected: The model's.
        stored: The checkpoint's.
        kind: The model's class, for messages.

    Raises:
        ConfigError: the names, or shapes, are not exactly those of the model; each that is not is named.
    """
    tries = [_with_prefix(expected, stored, prefix) for prefix in _prefixes(expected, stored)]
    matched, wrong = min(tries, key=lambda each: len(each[1]))
    if wrong:
        more = f"; and {len(wrong) - NUM_SHOWN} more" if len(wrong) > NUM_SHOWN else ""
        message = f"the checkpoint's tensors are not those of {kind}: {'; '.join(wrong[:NUM_SHOWN])}{more}"
        fix = "--to safetensors keeps the names; or give the trial a weight_names(model) with those of Hugging Face"
        raise ConfigError(Problem(key="--to", value="huggingface", message=message, fix=fix, code="names"))
    return matched


def _prefixes(expected: Expected, stored: Stored) -> Iterable[str]:
    """What may stand before every name in the checkpoint: ``""``, or what stands before any one of them."""
    found = {""}
    for name in list(expected.shapes)[:1] + list(expected.shapes)[-1:]:
        found |= {
            each.removesuffix(name) for each in (*stored.shapes, *stored.others) if each.endswith(f".{name}")
        }
    return sorted(found, key=len)


def _with_prefix(expected: Expected, stored: Stored, prefix: str) -> tuple[Matched, list[str]]:
    names: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    wrong: list[str] = []
    for name, shape in expected.shapes.items():
        every = [stored.find(prefix + each) for each in (name, *expected.tied.get(name, ()))]
        found = list(dict.fromkeys(each for each in every if each is not None))
        if not found:
            wrong.append(f"{name} {shape} is not in the checkpoint")
            continue
        names[name] = found[0]
        if len(found) > 1:
            copies[name] = tuple(found[1:])
        if stored.shapes[found[0]] != shape:
            wrong.append(f"{name} has shape {stored.shapes[found[0]]} in the checkpoint, and {shape} in it")
    taken = {*names.values(), *(each for several in copies.values() for each in several)}
    wrong += [f"{name} {shape} is not in it" for name, shape in stored.shapes.items() if name not in taken]
    return Matched(names=names, copies=copies), wrong
