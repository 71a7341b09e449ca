"""The keys of a DeepSpeed JSON: which ones DeepSpeed reads, as what, and the form that the rest of this package reads.

``deepspeed_keys.json`` is a JSON Schema of draft 7, generated from the installed DeepSpeed by
``tests/config/deepspeed/generate_deepspeed_keys.py``, which describes its few keywords of our own. DeepSpeed itself
ignores an unknown key at the top level in silence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined_ds.config.params import AUTO, OWN_KEYS
from determined_ds.documents.document import Document, KeyPath, dotted, nearest, unknown_keys, words
from determined_ds.documents.judging import faults
from determined_ds.documents.text import bound_words, kind_words
from determined_ds.errors import Problem

ZERO = "zero_optimization"
Node = dict[str, Any]
Located = list[tuple[KeyPath, Problem]]

# Keys of other places that are written at the top level or in zero_optimization -> where they belong, or the fix.
OTHER_NAMES = {
    **{name: f"write it in the experiment's YAML: hyperparameters.{name}" for name in OWN_KEYS},
    "learning_rate": "optimizer.params.lr",
    "batch_size": "write train_batch_size (of all replicas) or train_micro_batch_size_per_gpu (of one)",
    "profiling": 'write "flops_profiler": {"enabled": true}, or "wall_clock_breakdown": true',
    **dict.fromkeys(("precision", "dtype"), 'write "bf16": {"enabled": true}, or "fp16": {"enabled": true}'),
}
# Sections that are written as a plain value -> the key in them that was meant.
MEANT: dict[KeyPath, str] = {
    ("bf16",): "enabled",
    ("fp16",): "enabled",
    (ZERO,): "stage",
    (ZERO, "offload_optimizer"): "device",
    (ZERO, "offload_param"): "device",
}
# Names that torch has beside DeepSpeed's own. Any other name may be newer, unless it is close to one of them.
TORCH_TYPES = {
    "optimizer": words("""Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD LBFGS Muon NAdam Optimizer RAdam RMSprop
    Rprop SGD SparseAdam"""),
    "scheduler": words("""ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR
    ExponentialLR LambdaLR LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau
    SequentialLR StepLR"""),
}
# JSON has no comments; these are the usual stand-ins, which DeepSpeed reads over at the top level alone.
COMMENTS = ("$schema", "//", "#", "_comment", "__comment")
ONE_BIT = words("onebitadam onebitlamb zerooneadam")  # gone from DeepSpeed 0.19; the rules refuse them


@functools.cache
def known_keys() -> Node:
    """The schema: ``properties`` at every depth, and beside them the names that optimizers and schedules take."""
    tree: Node = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())
    return tree


def params_of(section: str, kind: Any) -> list[str] | None:
    """What DeepSpeed's own ``optimizer`` or ``scheduler`` of that type takes; None for any other, torch's too."""
    name = str(kind).lower() if section == "optimizer" else str(kind)
    takes: list[str] | None = known_keys()[f"{section}_params"].get(name)
    return takes


def located_problems(document: Document) -> Located:
    """Every key of a DeepSpeed JSON that the installed DeepSpeed does not read, or reads as another type.

    Each with the path of the value at fault; () where it is the key. ``"auto"`` is of every type.
    """
    broken: dict[KeyPath, tuple[Node, list[str]]] = {}
    for fault in faults(known_keys(), document.data, wildcard=AUTO):
        path, keyword = fault.path, fault.keyword
        if keyword == "unknown":
            path, keyword = path[:-1], "additionalProperties"
        broken.setdefault(path, (fault.schema, []))[1].append(keyword)
    found = [each for path, how in broken.items() for each in _in_words(document, path, *how)]
    return [*found, *_params_and_types(document)]


def _in_words(
    document: Document, path: KeyPath, node: Node, broken: list[str]
) -> Iterator[tuple[KeyPath, Problem]]:
    """One problem of the value at a path, and one of each key in it that is not read."""
    value = document.get(path)
    message = fix = ""
    code = "out-of-range"
    if "removed" in broken:
        message, fix, code = str(node["removed"]).strip(), "remove it", "removed-key"
    elif "deprecated" in broken:
        new = node["deprecated"]
        new += ': {"device": "cpu"}' if (*path[:-1], new) in MEANT else ""
        message, fix, code = (
            "is an old name, deprecated by DeepSpeed",
            f"write {new} instead",
            "deprecated-key",
        )
    elif "type" in broken:
        (message, fix), code = kind_words(node["type"], value), "wrong-type"
        if path in MEANT and isinstance(value, (bool, int, str)):
            if MEANT[path] == "device" and not isinstance(value, str):
                value = "cpu" if value else "none"
            elif MEANT[path] == "stage" and isinstance(value, bool):
                value = int(value)
            fix = f"write {json.dumps({MEANT[path]: value})}"
    elif "enum" in broken:
        allowed = ", ".join(json.dumps(item) for item in node["enum"] if item is not None)
        message, fix = "is not one of the values DeepSpeed knows", f"use {allowed}"
    else:
        message, fix = next((said for name in broken if (said := bound_words(name, node[name]))), ("", ""))
    if message:
        yield path, document.problem(path, message, fix, code)
    if "additionalProperties" not in broken:
        return
    known: Node = node["properties"]
    current = [key for key, child in known.items() if "removed" not in child and "deprecated" not in child]
    elsewhere = {**_elsewhere(), **OTHER_NAMES} if path in ((), (ZERO,)) else _elsewhere()
    for problem in unknown_keys(document, path, known, elsewhere, suggested=current):
        if path or not problem.key.lower().startswith(COMMENTS):
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
        kind, own = document.get(here), known_keys()[f"{section}_types"]
        takes = params_of(section, kind)
        if takes is not None:
            read = {*takes, "max_grad_norm"}  # an old name, which the schema has
            for problem in unknown_keys(document, (section, "params"), read, suggested=takes):
                yield (), problem
        if not isinstance(kind, str) or kind == AUTO or kind.lower() in ONE_BIT:
            continue
        known = {name.lower(): name for name in (*own, *torch_types)}
        is_known = kind in known.values() or (section == "optimizer" and kind.lower() in own)
        if not is_known and (guess := nearest(kind.lower(), known)):
            fix = f"did you mean {known[guess]}?"
            yield here, document.problem(here, f"no such {section}", fix, "unknown-type")


def normalized(document: Document) -> Document:
    """The same configuration in the form that the rest reads; it must have no :func:`located_problems`.

    Whole floats become the integers that they stand for (``5e8``), and a ``comms_logger`` that is not enabled is left
    out, since DeepSpeed is switched on by its mere presence.

    Source: ``DeepSpeedCommsConfig`` in deepspeed 0.19.8's ``comm/config.py``.
    """

    def whole(node: Node, data: dict[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, int, str]]:
        for key, value in data.items():
            child, here = node.get("properties", {}).get(key, {}), (*path, key)
            if isinstance(value, dict):
                yield from whole(child, value, here)
            elif isinstance(value, float) and value.is_integer() and "integer" in child.get("type", ()):
                yield here, int(value), document.origin(here)

    comms_logger = document.get(("comms_logger",))
    if isinstance(comms_logger, dict) and not comms_logger.get("enabled"):
        document = document.without(("comms_logger",))
    changes = [*whole(known_keys(), document.data, ())]
    return document.overwritten_all(changes) if changes else document
