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
from determined_ds.documents.document import Document, KeyPath, nearest, unknown_key, words
from determined_ds.documents.judging import Fault, faults, problem_of
from determined_ds.errors import NOT_GIVEN, Problem

ZERO = "zero_optimization"
Node = dict[str, Any]
Located = list[tuple[KeyPath, Problem]]

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
# A key that is read in another place -> the fix.
ELSEWHERE = {
    **{name: f"write it in the experiment's YAML: hyperparameters.{name}" for name in OWN_KEYS},
    "lr": "write optimizer.params.lr",
    "learning_rate": "write optimizer.params.lr",
    "batch_size": "write train_batch_size (of all replicas) or train_micro_batch_size_per_gpu (of one)",
}


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
    """Every key that the installed DeepSpeed does not read, or reads as another type, with its path."""
    broken = faults(known_keys(), document.data, takes_auto=True)

    def is_harmless(path: KeyPath, fault: Fault) -> bool:
        if fault.keyword == "deprecated":  # DeepSpeed takes an old name unless the new one is there too
            is_off = fault.value is False and "boolean" in fault.schema["type"]
            return is_off and document.get((*path[:-1], fault.detail)) is None
        return fault.keyword == "unknown" and len(path) == 1 and str(path[0]).lower().startswith(COMMENTS)

    found = [
        (path, _in_words(document, each)) for path, each in broken.items() if not is_harmless(path, each)
    ]
    return [*found, *_params_and_types(document)]


def _in_words(document: Document, fault: Fault) -> Problem:
    path, detail = fault.path, fault.detail
    if fault.keyword == "removed":
        return document.problem(path, detail.strip(), "remove it", "removed-key")
    if fault.keyword == "deprecated":
        message = "is an old name, deprecated by DeepSpeed"
        return document.problem(path, message, f"write {detail} instead", "deprecated-key")
    return problem_of(document, fault, elsewhere=ELSEWHERE)


def _params_and_types(document: Document) -> Iterator[tuple[KeyPath, Problem]]:
    """What no schema says: types that torch may have too, and the parameters that go with a type."""
    for section, torch_types in TORCH_TYPES.items():
        here: KeyPath = (section, "type")
        kind, own = document.get(here), known_keys()[f"{section}_types"]
        takes = params_of(section, kind)
        params = document.get((section, "params"))
        for key in params if isinstance(params, dict) else ():
            path: KeyPath = (section, "params", key)
            if takes is not None and key not in takes and key != "max_grad_norm":  # old, and in the schema
                yield path, unknown_key(document, path, takes)
        if not isinstance(kind, str) or kind == AUTO:
            continue
        known = {name.lower(): name for name in (*own, *torch_types)}
        is_known = kind in known.values() or (section == "optimizer" and kind.lower() in own)
        if not is_known and (guess := nearest(kind.lower(), known)):
            fix = f"did you mean {known[guess]}?"
            yield here, document.problem(here, f"no such {section}", fix, "unknown-type")


def normalized(document: Document) -> Document:
    """The same configuration in the form that the rest reads; it must have no :func:`located_problems`.

    Whole floats become the integers that they stand for (``5e8``), a precision that is "auto" is so by its key
    ``enabled``, and a ``comms_logger`` that is not enabled is left out, since its mere presence switches it on.

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
        document = document.overwritten((("comms_logger",), NOT_GIVEN, ""))
    changes: list[tuple[KeyPath, Any, str]] = [*whole(known_keys(), document.data, ())]
    autos = [(name,) for name in ("bf16", "fp16") if document.get((name,)) == AUTO]
    changes += [((*path, "enabled"), AUTO, document.origin(path)) for path in autos]
    return document.overwritten(*changes) if changes else document
