"""A DeepSpeed JSON -> Document: found inside the context directory, every key known, every type right.

DeepSpeed ignores an unknown key at the top level in silence. The keys it does read are data, ``deepspeed_keys.json``,
generated from the installed DeepSpeed by ``tests/config/deepspeed/generate_deepspeed_keys.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from determined_ds.config.aliases import FORMS, IN_JSON, NOT_READ
from determined_ds.config.deepspeed.old_names import NEW_NAMES, by_new_names, given_twice
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, KeyPath, dotted, nearest, unknown_keys, words
from determined_ds.documents.reading import read_json
from determined_ds.documents.values import JSON_TYPES, KINDS, is_of, kind_of, type_fix
from determined_ds.errors import ConfigError, Problem


@functools.cache
def known_keys() -> dict[str, Any]:
    """The tree of keys that the installed DeepSpeed reads. See the generator for its form."""
    text = Path(__file__).with_name("deepspeed_keys.json").read_text()
    tree: dict[str, Any] = json.loads(text)
    return tree


def find_deepspeed_config(hyperparameters: Document, context_dir: Path) -> Document:
    """The DeepSpeed JSON that ``hyperparameters.deepspeed_config`` names or holds; an empty one where it does neither.

    Args:
        hyperparameters: One point.
        context_dir: The directory that Determined sends to the cluster; paths are relative to it.

    Raises:
        ConfigError: the path leaves the context directory, or the file cannot be read.
    """
    inner: KeyPath = ("deepspeed_config",)
    value = hyperparameters.get(inner)
    if isinstance(value, dict):
        sub = hyperparameters.sub(inner)
        return Document(name=sub.name, data=value, places=sub.places, overwrites=sub.overwrites)
    if not isinstance(value, str):
        return Document(name="no deepspeed_config", data={})
    problem = _path_problem(value, context_dir, hyperparameters)
    if problem:
        raise ConfigError(problem)
    return read_json(context_dir / value)


def _path_problem(value: str, context_dir: Path, hyperparameters: Document) -> Problem | None:
    relative = "give a path relative to the context directory"
    message, fix = "", relative
    try:
        root = context_dir.resolve()
        target = (root / value).resolve()
        if not target.is_relative_to(root):
            message = "lies outside the context directory, so a cluster would not get it"
            fix = f"move it inside, and {relative}"
        elif not target.is_file():
            message = "is not a file" if target.exists() else "no such file in the context directory"
            folder = next((p for p in target.parents if p.is_dir() and p.is_relative_to(root)), root)
            names = sorted(str(p.relative_to(root)) for p in folder.glob("*.json"))
            fix = f"there are: {', '.join(names[:12])}" if names else relative
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte in it, links in a circle
        message = f"is not a valid path: {getattr(error, 'strerror', None) or error}"
    if not message:
        return None
    return hyperparameters.problem(("deepspeed_config",), message, fix, "deepspeed-config-path")


def located_problems(
    document: Document, *, sound: Mapping[str, Any] | None = None
) -> list[tuple[KeyPath, Problem]]:
    """Every key of a DeepSpeed JSON that the installed DeepSpeed does not read, or reads as another type.

    Args:
        document: The DeepSpeed JSON.
        sound: An earlier state of it. Its values had no problem, and are skipped, at any depth.

    Returns:
        The path of the value at fault, () where no value is, and the problem.
    """
    found: Located = []
    _walk(document, (), known_keys(), found, sound or {})
    return [*found, *_params(document), *_types(document)]


Located = list[tuple[KeyPath, Problem]]


_ABSENT = object()
WITH_ALIASES: tuple[KeyPath, ...] = ((), ("zero_optimization",))


def _walk(
    document: Document, path: KeyPath, node: dict[str, Any], found: Located, sound: Mapping[str, Any]
) -> None:
    known: dict[str, Any] = node.get("keys", {})
    section = document.get(path)
    if not node.get("free") and not section.keys() <= known.keys():
        current = [
            key for key, child in known.items() if "removed" not in child and "deprecated" not in child
        ]
        elsewhere = {**_elsewhere(), **IN_JSON} if path in WITH_ALIASES else _elsewhere()
        for problem in unknown_keys(document, path, known, elsewhere, suggested=current):
            if not _is_comment(problem.key.removeprefix(document.key((*path, "")))):
                found.append(((), problem))
            elif path:  # at the top level DeepSpeed reads over it
                found.append(
                    ((), dataclasses.replace(problem, fix="remove it: DeepSpeed takes no comment here"))
                )
    for key, value in section.items():
        child = known.get(key)
        here = (*path, key)
        # An old name is sound only where the new one is not given.
        if child is None or (sound and sound.get(key, _ABSENT) is value and here not in NEW_NAMES):
            continue
        if "removed" in child:
            message = str(child["removed"]).strip()
            found.append((here, document.problem(here, message, "remove it", "removed-key")))
        elif here in NEW_NAMES and (twice := given_twice(document, here)):
            found.append((here, twice))
        elif "deprecated" in child and here not in NEW_NAMES:
            message, fix = (
                "is an old name, which DeepSpeed reads no more",
                f"write {child['deprecated']} instead",
            )
            found.append((here, document.problem(here, message, fix, "deprecated-key")))
        elif value != AUTO:
            _value(document, here, value, child, found, sound.get(key))
            if here in NOT_READ and value is not None:
                message = "is not read by DeepSpeed"
                found.append(((), document.problem(here, message, NOT_READ[here], "unread-key")))


def _is_comment(key: str) -> bool:
    """JSON has no comments; these are the usual stand-ins."""
    return key == "$schema" or key.lower().startswith(("//", "#", "_comment", "__comment"))


@functools.cache
def _elsewhere() -> dict[str, str]:
    """Key that is read in one place only -> its dotted name, for keys that are written at another level."""
    found: dict[str, list[str]] = {}

    def walk(path: tuple[str, ...], node: dict[str, Any]) -> None:
        for key, child in node.get("keys", {}).items():
            if not {"removed", "deprecated"} & child.keys():
                found.setdefault(key, []).append(dotted((*path, key)))
                walk((*path, key), child)

    walk((), known_keys())
    return {key: names[0] for key, names in found.items() if len(names) == 1}


# Numbers among the free parameters of optimizers and schedules; a schedule may list one a parameter group.
NUMBERS = words("lr eps weight_decay warmup_min_lr warmup_max_lr warmup_num_steps total_num_steps")


def params_of(section: str, kind: Any) -> list[str] | None:
    """What DeepSpeed's own ``optimizer`` or ``scheduler`` of that type takes; None for any other, torch's too."""
    name = str(kind).lower() if section == "optimizer" else str(kind)
    takes: list[str] | None = known_keys()[f"{section}_params"].get(name)
    return takes


def _params(document: Document) -> Iterator[tuple[KeyPath, Problem]]:
    for section in ("optimizer", "scheduler"):
        params = document.get((section, "params"))
        takes = params_of(section, document.get((section, "type")))
        if takes is not None:
            old = known_keys()["keys"][section]["keys"]["params"].get("keys", ())  # old names, by `_walk`
            for problem in unknown_keys(document, (section, "params"), {*takes, *old}, suggested=takes):
                yield (), problem
        for key, value in params.items() if isinstance(params, dict) else ():
            here = (section, "params", key)
            if key in NUMBERS and value != AUTO and isinstance(value, (str, bool, dict)):
                message = f"must be a number, not {kind_of(value)}"
                yield here, document.problem(here, message, type_fix(float, value), "wrong-type")
            elif key == "betas" and value != AUTO and not _are_numbers(value):
                fix = "write e.g. [0.9, 0.999]"
                yield here, document.problem(here, "must be a list of numbers", fix, "wrong-type")


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(is_of(item, ("number",)) for item in value)


# Names that torch has beside DeepSpeed's own. Any other name may be newer, unless it is close to one of them.
TORCH_TYPES = {
    "optimizer": words("""Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD LBFGS Muon NAdam Optimizer RAdam RMSprop
    Rprop SGD SparseAdam"""),
    "scheduler": words("""ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR
    ExponentialLR LambdaLR LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau
    SequentialLR StepLR"""),
}
# Gone from DeepSpeed 0.19; see the compatibility table.
ONE_BIT = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


def _types(document: Document) -> Iterator[tuple[KeyPath, Problem]]:
    for section, torch_types in TORCH_TYPES.items():
        here = (section, "type")
        kind = document.get(here)
        own = known_keys()[f"{section}_types"]
        if not isinstance(kind, str) or kind in own or kind in torch_types:
            continue
        if kind == AUTO or kind.lower() in ONE_BIT:
            continue
        if section == "optimizer" and kind.lower() in own:  # DeepSpeed folds the case of its own
            continue
        known = {name.lower(): name for name in (*own, *torch_types)}
        guess = nearest(kind.lower(), known)
        if guess:
            fix = f"did you mean {known[guess]}?"
            yield here, document.problem(here, f"no such {section}", fix, "unknown-type")


def normalized(document: Document, *, in_form: Mapping[str, Any] | None = None) -> Document:
    """The same configuration in the form that the rest reads; it must have no :func:`located_problems`.

    Whole floats become the integers that they stand for (``5e8``), ``zero_optimization: true``, the oldest form,
    becomes stage 1, old names that DeepSpeed still reads become those of today, and a ``comms_logger`` that is not
    enabled is left out.

    Source: ``DeepSpeedCommsConfig`` in deepspeed 0.19.8's ``comm/config.py`` looks for the section alone.

    Args:
        document: The DeepSpeed JSON.
        in_form: An earlier state of it that was normalized; values that are unchanged are skipped.
    """
    zero = document.get(("zero_optimization",))
    if isinstance(zero, bool):
        path: KeyPath = ("zero_optimization",)
        document = document.overwritten(path, {"stage": int(zero)}, document.origin(path))
    document = by_new_names(document)
    comms_logger = document.get(("comms_logger",))
    if isinstance(comms_logger, dict) and not comms_logger.get("enabled"):
        document = document.without(
            ("comms_logger",)
        )  # DeepSpeed is switched on by the section's mere presence
    changes = [
        (path, int(value), document.origin(path))
        for path, value in _whole_floats(document.data, (), known_keys(), in_form or {})
    ]
    return document.overwritten_all(changes) if changes else document


def _whole_floats(
    data: dict[str, Any], path: KeyPath, node: dict[str, Any], in_form: Mapping[str, Any]
) -> Iterator[tuple[KeyPath, float]]:
    for key, value in data.items():
        before = in_form.get(key, _ABSENT)
        if before is value:
            continue
        child = node.get("keys", {}).get(key, {})
        if isinstance(value, dict):
            yield from _whole_floats(value, (*path, key), child, before if isinstance(before, dict) else {})
        elif isinstance(value, float) and "integer" in child.get("types", ()) and value.is_integer():
            yield (*path, key), value


def _value(
    document: Document, path: KeyPath, value: Any, node: dict[str, Any], found: Located, sound: Any
) -> None:
    types = node.get("types")
    if types and not is_of(value, types):
        named = [name for name in types if name != "null"]
        wanted = " or ".join(KINDS[JSON_TYPES[name]] for name in named) or "null"
        fix = type_fix(JSON_TYPES[named[0]], value) if named and value is not None else "remove it"
        fix = _form(path, value) or fix
        message = f"must be {wanted}, not {kind_of(value)}"
        found.append((path, document.problem(path, message, fix, "wrong-type")))
    elif "enum" in node and not _among(value, node):
        allowed = ", ".join(json.dumps(item) for item in node["enum"] if item is not None)
        message = "is not one of the values DeepSpeed knows"
        found.append((path, document.problem(path, message, f"use {allowed}", "out-of-range")))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        bound = _bound_broken(value, node)
        if bound:
            message, fix = f"must be {bound}", f"write a value {bound}"
            found.append((path, document.problem(path, message, fix, "out-of-range")))
    if isinstance(value, dict) and "keys" in node:
        _walk(document, path, node, found, sound if isinstance(sound, dict) else {})


def _form(path: KeyPath, value: Any) -> str:
    """How to write a section that is given as a plain value; "" where that is unknown."""
    if path not in FORMS or value is None or isinstance(value, (list, float)):
        return ""
    if value is False and path[-1] in ("offload_optimizer", "offload_param"):
        return "remove it"
    device = value if isinstance(value, str) else "cpu"
    return "write " + FORMS[path].format(value=json.dumps(value), device=device)


def _among(value: Any, node: dict[str, Any]) -> bool:
    if node.get("ignore_case") and isinstance(value, str):
        return value.lower() in [item.lower() for item in node["enum"] if isinstance(item, str)]
    return value in node["enum"]


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "minimum_exclusive": (operator.gt, "above"),
    "maximum_exclusive": (operator.lt, "below"),
}


def _bound_broken(value: float, node: dict[str, Any]) -> str | None:
    for name, (holds, relation) in _BOUNDS.items():
        if name in node and not holds(value, node[name]):
            return f"{relation} {node[name]}"
    return None
