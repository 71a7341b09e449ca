"""An error of pydantic's in this package's words: what is wrong, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from determined_ds.documents.document import known_here, nearest
from determined_ds.documents.values import KINDS, MAX_EXACT, kind_of, type_fix
from determined_ds.experiment.experiment import ELSEWHERE
from determined_ds.experiment.schema import searcher, storage
from determined_ds.experiment.schema.environment import Environment
from determined_ds.experiment.schema.locate import Located
from determined_ds.experiment.schema.root import (
    ExperimentConfig,
    Optimizations,
    Profiling,
    RetentionPolicy,
)
from determined_ds.experiment.schema.section import Section

WRONG_TYPES: dict[str, type] = {
    "string_type": str,
    "int_type": int,
    "float_type": float,
    "bool_type": bool,
    "list_type": list,
    "dict_type": dict,
    "model_type": dict,
}
BOUNDS = {
    "greater_than_equal": ("ge", "must be {} or more", "write {} or more"),
    "greater_than": ("gt", "must be more than {}", "write more than {}"),
    "less_than_equal": ("le", "must be at most {}", "write {} or less"),
}
SEARCHERS: dict[str, type[Section]] = {
    "single": searcher.Single,
    "random": searcher.Random,
    "grid": searcher.Grid,
    "adaptive_asha": searcher.AdaptiveASHA,
    "async_halving": searcher.AsyncHalving,
}


NOT_ADVISED = {"agent_label", "data_layer", "gpu", "slots", "user"}  # known, but of no use


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a problem says.

    Args:
        meant: Dotted name of the key that an unknown one was probably meant for; "" where that is not known.
    """

    code: str
    message: str
    fix: str
    meant: str = ""


def worded(error: ErrorDetails, at: Located) -> Words:
    """The words of an error at its place."""
    kind, context = error["type"], error.get("ctx", {})
    key, value = at.path[-1] if at.path else "", error["input"]
    if kind == "extra_forbidden":
        return _unknown(at)
    if kind == "missing" or (value is None and at.field is not None and at.field.is_required()):
        return _missing(at, "missing" if kind == "missing" else "null")
    if kind in WRONG_TYPES:
        expected = WRONG_TYPES[kind]
        message = f"must be {KINDS[expected]}, not {kind_of(value)}"
        fix = _type_fix(expected, key, value)
        if context.get("class_name") in ("Duration", "PositiveDuration") and isinstance(value, int):
            fix = f"write {key}: {{batches: {value}}}"
        elif expected is dict and at.field is not None and at.field.examples:
            fix = f"write {key}: {at.field.examples[0]}"
        return Words(code="wrong-type", message=message, fix=fix)
    if kind in BOUNDS:
        bound, message, fix = BOUNDS[kind]
        number = f"{context[bound]:g}" if context[bound] < 1e6 else str(context[bound])
        if key == "slots_per_trial":  # the master takes 0, and nothing is trained on it
            fix = "write 1 or more"
        return Words(code="out-of-range", message=message.format(number), fix=fix.format(number))
    if kind == "literal_error":
        return _choice(re.findall("'([^']*)'", context["expected"]), value)
    if kind == "none_required":
        return Words(code="removed-key", message="has been removed from Determined", fix="remove it")
    if kind == "wrong-kind":
        message = f"must be {context['expected']}, not {kind_of(value)}"
        return Words(code="wrong-type", message=message, fix=str(context["fix"]))
    if (
        "fix" not in context
    ):  # half a character for a key; mappings in mappings beyond what a reader lets pass
        return Words(code="invalid", message=f"cannot be read: {error['msg']}", fix="write it more plainly")
    return Words(code=kind, message=context["message"], fix=context["fix"])


def _choice(choices: list[str], value: Any) -> Words:
    one_of = ", ".join(choices)
    if not isinstance(value, str):
        fix = f"use one of {one_of}"
        return Words(code="wrong-type", message=f"must be one of {one_of}, not {kind_of(value)}", fix=fix)
    guess = nearest(value, choices)
    fix = f"did you mean {guess!r}? use one of {one_of}" if guess else f"use one of {one_of}"
    return Words(code="out-of-range", message=f"must be one of {one_of}", fix=fix)


def _missing(at: Located, how: str) -> Words:
    field, key = at.field, at.path[-1]
    assert field is not None
    why = f": {field.description}" if field.description else ", and it is needed"
    example = field.examples[0] if field.examples else "..."
    return Words(code="missing-key", message=f"{how}{why}", fix=f"write {key}: {example}")


def _type_fix(expected: type, key: str | int, value: Any) -> str:
    """How to write it. A key that is a string can be named; what is in a list has none."""
    name = f"{key}: " if isinstance(key, str) else ""
    if expected is str and isinstance(value, (int, float)):
        text = str(value).lower() if isinstance(value, bool) else value
        return f'put it in quotes: "{text}"'
    if expected is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"remove the quotes: {value.lower()}"
    if expected is list and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return f"write {name}[{value}]"
    if expected is dict:
        return f"write {name}{{...}}"
    if expected is list:
        return f"write {name}[...]"
    if expected is int and isinstance(value, float) and abs(value) <= MAX_EXACT:
        more = ", or use type: double" if key in ("minval", "maxval") else ""
        return f"write {round(value)}{more}"
    return type_fix(expected, value)


# --- Unknown keys -------------------------------------------------------------------------------------------


def _unknown(at: Located) -> Words:
    assert at.owner is not None
    *above, word = (str(step) for step in at.path)
    kinds = _kinds(at.owner)
    having = [kind for kind, model in kinds.items() if word in model.model_fields]
    if having and at.tag in kinds:
        what = "searcher" if kinds is SEARCHERS else "storage"
        message = f"unknown key: the {at.tag} {what} does not have it"
        fix = f"remove it, or use {what} {' or '.join(having)}"
        return Words(code="unknown-key", message=message, fix=fix)
    known = sorted(at.owner.model_fields.keys() - NOT_ADVISED)
    place = _elsewhere().get(word, "")
    of_any_kind = sorted({key for model in kinds.values() for key in model.model_fields})
    guess = nearest(word, known) or nearest(word, of_any_kind)
    if " " in place:
        fix, meant = place, ""
    elif place and place.rpartition(".")[0] != ".".join(above):
        fix, meant = f"did you mean {place}?", place
        fix = fix if "." in place else f"write {word} at the top level, beside {above[0]}"
    elif guess:
        fix, meant = f"did you mean {guess!r}?", ".".join((*above, guess))
    else:
        fix, meant = known_here(known), ""
    return Words(code="unknown-key", message="unknown key", fix=fix, meant=meant)


def _kinds(owner: type[Section]) -> Mapping[str, type[Section]]:
    if issubclass(owner, searcher.Searcher):
        return SEARCHERS
    return storage.KINDS if issubclass(owner, storage.Saves) else {}


@cache
def _elsewhere() -> dict[str, str]:
    """A key -> where it belongs, for those that belong in one place."""
    sections: dict[str, type[Section]] = {
        "environment": Environment,
        "optimizations": Optimizations,
        "profiling": Profiling,
        "retention_policy": RetentionPolicy,
        "checkpoint_storage": storage.Saves,
    }
    below = {key: f"{name}.{key}" for name, model in sections.items() for key in model.model_fields}
    top = {key: key for key in ExperimentConfig.model_fields if key != "name"}
    return {**below, **ELSEWHERE, **top}
