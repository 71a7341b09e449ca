"""The keys of a DeepSpeed JSON: which ones DeepSpeed reads, as what, and the form that the rest of this package reads.

``deepspeed_keys.json`` is a JSON Schema of draft 7, generated from the installed DeepSpeed by
``tests/config/deepspeed/generate_deepspeed_keys.py``, which describes its few keywords of our own. DeepSpeed itself
ignores an unknown key at the top level in silence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.config.params import AUTO, OWN_KEYS
from determined_ds.documents.document import Document, KeyPath, dotted, nearest, unknown_keys, words
from determined_ds.documents.plain_fit import fits_plainly
from determined_ds.documents.text import bound_words, is_of, kind_of, kind_words, type_fix
from determined_ds.errors import Problem

ZERO = "zero_optimization"
Node = dict[str, Any]
Located = list[tuple[KeyPath, Problem]]
_ABSENT: Any = object()

# Keys of other places that are written at the top level or in zero_optimization -> where they belong, or the fix.
OTHER_NAMES = {
    **{name: f"write it in the experiment's YAML: hyperparameters.{name}" for name in OWN_KEYS},
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.params.lr"),
    "batch_size": "write train_batch_size (of all replicas) or train_micro_batch_size_per_gpu (of one)",
    "profiling": 'write "flops_profiler": {"enabled": true}, or "wall_clock_breakdown": true',
    **dict.fromkeys(("precision", "dtype"), 'write "bf16": {"enabled": true}, or "fp16": {"enabled": true}'),
}
# Sections that are written as a plain value -> the form that DeepSpeed takes.
_OFFLOADS: tuple[KeyPath, ...] = ((ZERO, "offload_optimizer"), (ZERO, "offload_param"))
FORMS: dict[KeyPath, str] = {
    **{(name,): '{{"enabled": {value}}}' for name in ("bf16", "fp16")},
    **dict.fromkeys(_OFFLOADS, '{{"device": "{device}"}}'),
    (ZERO,): '{{"stage": {number}}}',
    ("activation_checkpointing",): '{{"partition_activations": {value}}}',
}
# Numbers among the free parameters of optimizers and schedules; a schedule may list one a parameter group.
NUMBERS = words("lr eps weight_decay warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps")
# Names that torch has beside DeepSpeed's own. Any other name may be newer, unless it is close to one of them.
TORCH_TYPES = {
    "optimizer": words("""Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD LBFGS Muon NAdam Optimizer RAdam RMSprop
    Rprop SGD SparseAdam"""),
    "scheduler": words("""ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR
    ExponentialLR LambdaLR LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau
    SequentialLR StepLR"""),
}
ONE_BIT = frozenset(
    {"onebitadam", "onebitlamb", "zerooneadam"}
)  # gone from DeepSpeed 0.19; the rules refuse them


@functools.cache
def known_keys() -> Node:
    """The schema: ``properties`` at every depth, and beside them the names that optimizers and schedules take."""
    tree: Node = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())
    del tree["$schema"]  # by which a validator's evolve() would choose its class anew, without our keywords
    return tree


def params_of(section: str, kind: Any) -> list[str] | None:
    """What DeepSpeed's own ``optimizer`` or ``scheduler`` of that type takes; None for any other, torch's too."""
    name = str(kind).lower() if section == "optimizer" else str(kind)
    takes: list[str] | None = known_keys()[f"{section}_params"].get(name)
    return takes


# ------------------------------------------------------------------------------------------- by the schema


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft7Validator, ValidationError, validators  # takes 50 ms

    def kinds(_: Any, types: list[str], value: Any, node: Node) -> Iterator[ValidationError]:
        if value != AUTO and not is_of(value, types):
            yield ValidationError("")

    def among(_: Any, allowed: list[Any], value: Any, node: Node) -> Iterator[ValidationError]:
        if node.get("ignoreCase") and isinstance(value, str):
            value, allowed = value.lower(), [item.lower() for item in allowed if isinstance(item, str)]
        if value != AUTO and value not in allowed:
            yield ValidationError("")

    def extra(_: Any, allowed: bool, value: Any, node: Node) -> Iterator[ValidationError]:
        if not allowed and isinstance(value, dict) and not value.keys() <= node["properties"].keys():
            yield ValidationError("")

    def always(_: Any, why: str, value: Any, node: Node) -> Iterator[ValidationError]:
        yield ValidationError("")

    keywords = {"type": kinds, "enum": among, "additionalProperties": extra}
    made = validators.extend(Draft7Validator, {**keywords, "removed": always, "deprecated": always})
    return made(known_keys())


Fault = tuple[KeyPath, str]  # where, and the keyword of the schema that is broken there


def _node(path: KeyPath) -> Node | None:
    """The schema of what stands at a path; empty where anything may stand, None where nothing is read."""
    node = known_keys()
    for key in path:
        found = node.get("properties", {}).get(key)
        if found is None:
            return {} if node.get("additionalProperties", True) else None
        node = found
    return node


def _faults(path: KeyPath, value: Any) -> list[Fault]:
    node = _node(path)
    if node is None:
        unread = next(end for end in range(1, len(path) + 1) if _node(path[:end]) is None)
        return [(path[: unread - 1], "additionalProperties")]
    if fits_plainly(node, value, wildcard=AUTO):
        return []
    errors = _validator().evolve(schema=node).iter_errors(value)
    return [((*path, *error.absolute_path), error.validator) for error in errors]


@functools.lru_cache(maxsize=10_000)  # many points of a search state the same
def _faults_of_scalar(path: KeyPath, value: Any, kind: str) -> list[Fault]:
    return _faults(path, value)


def _changed(data: Mapping[str, Any], before: Mapping[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    """The uppermost paths whose values differ from those of an earlier state."""
    for key, value in data.items():
        was = before.get(key, _ABSENT)
        if isinstance(value, dict) and isinstance(was, dict):
            if value is not was:
                yield from _changed(value, was, (*path, key))
        elif value is not was:
            yield (*path, key)


def located_problems(document: Document, *, sound: Mapping[str, Any] | None = None) -> Located:
    """Every key of a DeepSpeed JSON that the installed DeepSpeed does not read, or reads as another type.

    Args:
        document: The DeepSpeed JSON.
        sound: An earlier state of it. Its values had no problem, and are not judged again.

    Returns:
        The path of the value at fault, () where no value is, and the problem.
    """
    faults: dict[KeyPath, set[str]] = {}
    for path in _changed(document.data, sound, ()) if sound else [()]:
        value = document.get(path)
        is_plain = isinstance(value, (str, int, float)) or value is None
        for where, keyword in (
            _faults_of_scalar(path, value, type(value).__name__) if is_plain else _faults(path, value)
        ):
            faults.setdefault(where, set()).add(keyword)
    found = [each for path, keywords in faults.items() for each in _problems_at(document, path, keywords)]
    return [*found, *_params_and_types(document)]


def _problems_at(document: Document, path: KeyPath, keywords: set[str]) -> Iterator[tuple[KeyPath, Problem]]:
    """The broken keywords of one value in words: one problem of the value, and one of each key that is not read."""
    node = _node(path) or {}
    value = document.get(path)
    message = fix = ""
    code = "out-of-range"
    bounds = [said for name in keywords if (said := bound_words(name, node.get(name)))]
    if "removed" in keywords:
        message, fix, code = str(node["removed"]).strip(), "remove it", "removed-key"
    elif "deprecated" in keywords:
        new, message, code = node["deprecated"], "is an old name, deprecated by DeepSpeed", "deprecated-key"
        new += ': {"device": "cpu"}' if (*path[:-1], new) in _OFFLOADS else ""
        fix = f"write {new} instead"
    elif "type" in keywords:
        (message, fix), code = kind_words(node["type"], value), "wrong-type"
        if path in FORMS and isinstance(value, (bool, int, str)):  # a section that is given as a plain value
            device = value if isinstance(value, str) else "cpu"
            number = int(value) if isinstance(value, bool) else json.dumps(value)
            fix = "write " + FORMS[path].format(value=json.dumps(value), number=number, device=device)
            fix = "remove it" if value is False and path in _OFFLOADS else fix
    elif "enum" in keywords:
        allowed = ", ".join(json.dumps(item) for item in node["enum"] if item is not None)
        message, fix = "is not one of the values DeepSpeed knows", f"use {allowed}"
    elif bounds:
        message, fix = bounds[0]
    if message:
        yield path, document.problem(path, message, fix, code)
    if "additionalProperties" not in keywords:
        return
    known: Node = node["properties"]
    current = [key for key, child in known.items() if "removed" not in child and "deprecated" not in child]
    elsewhere = {**_elsewhere(), **OTHER_NAMES} if path in ((), (ZERO,)) else _elsewhere()
    for problem in unknown_keys(document, path, known, elsewhere, suggested=current):
        key = problem.key.removeprefix(document.key((*path, "")))
        # JSON has no comments; these are the usual stand-ins, which DeepSpeed reads over at the top level alone.
        if key == "$schema" or key.lower().startswith(("//", "#", "_comment", "__comment")):
            if not path:
                continue
            problem = replace(problem, fix="remove it: DeepSpeed takes no comment here")
        yield (), problem


@functools.cache
def _elsewhere() -> dict[str, str]:
    """Key that is read in one place only -> its dotted name, for keys that are written at another level."""
    found: dict[str, list[str]] = {}

    def walk(path: KeyPath, node: Node) -> None:
        for key, child in node.get("properties", {}).items():
            if "removed" not in child and "deprecated" not in child:
                found.setdefault(key, []).append(dotted((*path, key)))
                walk((*path, key), child)

    walk((), known_keys())
    return {key: names[0] for key, names in found.items() if len(names) == 1}


def _params_and_types(document: Document) -> Iterator[tuple[KeyPath, Problem]]:
    """What no schema says: types that torch may have too, and the parameters that go with a type."""
    for section, torch_types in TORCH_TYPES.items():
        here: KeyPath = (section, "type")
        kind, params = document.get(here), document.get((section, "params"))
        takes = params_of(section, kind)
        if takes is not None:
            old = known_keys()["properties"][section]["properties"]["params"].get("properties", ())
            for problem in unknown_keys(document, (section, "params"), {*takes, *old}, suggested=takes):
                yield (), problem
        for key, value in params.items() if isinstance(params, dict) else ():
            path = (section, "params", key)
            if key in NUMBERS and value != AUTO and isinstance(value, (str, bool, dict)):
                message = f"must be a number, not {kind_of(value)}"
                yield path, document.problem(path, message, type_fix(float, value), "wrong-type")
            are_numbers = isinstance(value, list) and all(is_of(item, ("number",)) for item in value)
            if key == "betas" and value != AUTO and not are_numbers:
                fix = "write e.g. [0.9, 0.999]"
                yield path, document.problem(path, "must be a list of numbers", fix, "wrong-type")
        own = known_keys()[f"{section}_types"]
        if not isinstance(kind, str) or kind == AUTO or kind.lower() in ONE_BIT:
            continue
        if kind in (*own, *torch_types) or (section == "optimizer" and kind.lower() in own):
            continue
        known = {name.lower(): name for name in (*own, *torch_types)}
        if guess := nearest(kind.lower(), known):
            fix = f"did you mean {known[guess]}?"
            yield here, document.problem(here, f"no such {section}", fix, "unknown-type")


# ------------------------------------------------------------------------------------------- the form that is read


def normalized(document: Document, *, in_form: Mapping[str, Any] | None = None) -> Document:
    """The same configuration in the form that the rest reads; it must have no :func:`located_problems`.

    Whole floats become the integers that they stand for (``5e8``), and a ``comms_logger`` that is not enabled is left
    out, since DeepSpeed is switched on by its mere presence.

    Source: ``DeepSpeedCommsConfig`` in deepspeed 0.19.8's ``comm/config.py``.

    Args:
        document: The DeepSpeed JSON.
        in_form: An earlier state of it that was normalized; values that are unchanged are skipped.
    """
    comms_logger = document.get(("comms_logger",))
    if isinstance(comms_logger, dict) and not comms_logger.get("enabled"):
        document = document.without(("comms_logger",))
    changes = [
        (path, int(value), document.origin(path))
        for changed in _changed(document.data, in_form or {}, ())
        for path, value in _leaves(document.get(changed), changed)
        if isinstance(value, float)
        and value.is_integer()
        and "integer" in (_node(path) or {}).get("type", ())
    ]
    return document.overwritten_all(changes) if changes else document


def _leaves(value: Any, path: KeyPath) -> Iterable[tuple[KeyPath, Any]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
