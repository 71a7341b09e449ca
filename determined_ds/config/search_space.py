"""The search space of an experiment's hyperparameters -> one point of it, to be tried without a search."""

from __future__ import annotations

from typing import Any

from determined_ds.config.document import KeyPath
from determined_ds.config.findings import Findings

# A hyperparameter's type -> its fields (schemas expconf/v0/hyperparameter-*.json); all but count are required.
SPEC_FIELDS = {
    "categorical": ("vals",),
    "const": ("val",),
    "double": ("minval", "maxval", "count"),
    "int": ("minval", "maxval", "count"),
    "log": ("minval", "maxval", "base", "count"),
}
SPEC_TYPES = tuple(SPEC_FIELDS)


def one_point(found: Findings, path: KeyPath, value: Any, searched: list[str]) -> Any:
    """One point of the search space below ``path``: constants unwrapped, specs at their middle."""
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        return {key: one_point(found, (*path, key), item, searched) for key, item in value.items()}
    kind = value["type"]
    if kind not in SPEC_TYPES:
        found.add(
            path,
            "a mapping with a key `type` is read by Determined as a hyperparameter to search",
            "wrap the whole hyperparameter: {type: const, val: {...}}, or keep a DeepSpeed JSON in a file",
            "hyperparameter-spec",
        )
        return None
    surplus = [key for key in value if key not in ("type", *SPEC_FIELDS[kind])]
    if surplus:
        message = f"a {kind} hyperparameter has no field {', '.join(surplus)}"
        found.add(path, message, _spec_form(kind), "hyperparameter-spec")
        return None
    if kind != "const":
        searched.append(found.document.key(path))
    else:
        found.constants.append(path)
    try:
        return middle_of(value)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
        found.add(path, f"is no complete {kind} hyperparameter", _spec_form(kind), "hyperparameter-spec")
        return None


def _spec_form(kind: str) -> str:
    if kind == "const":
        return "write {type: const, val: ...}"
    if kind == "categorical":
        return "write {type: categorical, vals: [...]}"
    base = ", base: 10" if kind == "log" else ""
    return f"write {{type: {kind}, minval: ..., maxval: ...{base}}} with minval < maxval"


def middle_of(spec: dict[str, Any]) -> Any:
    """The value in the middle of a hyperparameter's range; the first of a list; a constant's own.

    A ``log`` hyperparameter ranges over base**minval .. base**maxval.

    Raises:
        KeyError, TypeError, ValueError, IndexError, ArithmeticError: it is no complete hyperparameter.
    """
    if spec["type"] == "const":
        return spec["val"]
    if spec["type"] == "categorical":
        if not isinstance(spec["vals"], list):
            raise TypeError("vals must be a list")
        return spec["vals"][0]
    low, high = spec["minval"], spec["maxval"]
    kinds = (int,) if spec["type"] == "int" else (int, float)
    if any(isinstance(bound, bool) or not isinstance(bound, kinds) for bound in (low, high)):
        raise TypeError("bounds must be numbers")
    if not low < high:
        raise ValueError("minval must be below maxval")
    if spec["type"] == "int":
        return (low + high) // 2
    middle = (low + high) / 2
    if spec["type"] == "double":
        return float(middle)
    if isinstance(spec["base"], bool) or spec["base"] <= 0:
        raise ValueError("base must be above 0")
    return float(spec["base"] ** middle)
