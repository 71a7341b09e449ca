"""Determined's schemas of an experiment configuration: what a master refuses, which keys it knows.

``schemas.json`` has the files of ``schemas/expconf/v0`` of Determined 0.38.1 by their names, each as it is there. They
are Determined's, under the Apache License 2.0, and its package does not contain them. :data:`EDITS` is what the
master's code refuses beyond them. A null counts as absent wherever a key may be absent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from determined_ds.config.params import BY_OTHER_NAMES, OWN_KEYS
from determined_ds.documents.document import (
    Document,
    KeyPath,
    dotted,
    get_path,
    meant_or_known,
    nearest,
    one_of,
)
from determined_ds.documents.judging import Fault, Json, faults, problem_of
from determined_ds.documents.text import kind_of
from determined_ds.errors import NOT_GIVEN, EntrypointError, Problem
from determined_ds.experiment.entrypoint import ENTRYPOINT_FORM, read_entrypoint
from determined_ds.experiment.space import AXES

SCHEMAS = Path(__file__).with_name("schemas.json")
SEARCHERS = ("single", "random", "grid", "adaptive_asha", "async_halving")
STORAGES = ("shared_fs", "directory", "s3", "gcs", "azure")
_ASHA_NEEDS = ["max_trials", "metric", "max_time", "time_metric"]
_IS_GRID = {"properties": {"name": {"const": "grid"}}, "required": ["name"], "type": "object"}

# File -> {place in it -> what is there in fact}. Source: the Go structs that the schemas are read into in
# determined 0.38.1's ``master/pkg/schemas/expconf``, and ``master/internal/core_experiment.go``.
EDITS: dict[str, dict[str, Json]] = {
    "experiment": {  # the master fills in the rest
        "eventuallyRequired": ["entrypoint", "searcher"],
        "allOf.0.if": {"properties": {"searcher": _IS_GRID}, "required": ["searcher"]},
    },
    "environment": {"eventuallyRequired": []},
    "environment-image-map": {"eventuallyRequired": []},
    "reproducibility": {"eventuallyRequired": [], "properties.experiment_seed.maximum": 2**32 - 1},
    # The schema takes "8g"; the struct does not. `slots` is for notebooks and commands.
    "resources": {"properties.shm_size.type": ["integer", "null"], "properties.slots": {"type": "null"}},
    "devices": {"items.union.items.1.pattern": "^/[^:]*:/[^:]*(:[^:]*)?$"},
    # The cluster's own storage completes them.
    **{storage: {"eventuallyRequired": []} for storage in ("shared-fs", "directory", "s3", "gcs")},
    "azure": {"eventuallyRequired": [], "checks": {}},
    "searcher-adaptive-asha": {"eventuallyRequired": _ASHA_NEEDS},
    "searcher-async-halving": {"eventuallyRequired": [*_ASHA_NEEDS, "num_rungs"]},
    "searcher": {
        "then.union.items": [
            {"unionKey": f"const:name={name}", "$ref": f"searcher-{name}"} for name in SEARCHERS
        ]
    },
}


@cache
def _schemas() -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    for name, edits in EDITS.items():
        for place, value in edits.items():
            path = tuple(int(step) if step.isdigit() else step for step in place.split("."))
            get_path(found[name], path[:-1])[path[-1]] = value
    return found


def schema(name: str) -> dict[str, Json]:
    """A schema by its address, or by the name of what it describes, e.g. ``searcher-grid``."""
    return _schemas()[name.rpartition("/")[2].removesuffix(".json").replace("_", "-")]


def keys_of(*names: str) -> frozenset[str]:
    """The keys that the schemas of these names know."""
    return frozenset(key for name in names for key in schema(name)["properties"])


@lru_cache(maxsize=4)  # several questions are asked of one document
def faults_of(document: Document) -> tuple[dict[KeyPath, Fault], Document]:
    """The fault of each place, and the document as it was meant.

    A misspelt key counts as the one that was meant, unless that is given too, so that this is not missing.
    """
    storage = document.get(("checkpoint_storage",))
    if isinstance(storage, dict) and "type" not in storage:
        # The cluster's own completes it, which is of the type that fits; its nulls stand for the cluster's values.
        known = keys_of("checkpoint-storage")
        storage = {key: value for key, value in storage.items() if value is not None or key not in known}
        storage["type"] = max(STORAGES, key=lambda kind: len(storage.keys() & keys_of(kind)))
    found = faults(schema("experiment"), {**document.data, "checkpoint_storage": storage}, named=schema)
    changes: list[tuple[KeyPath, Json, str]] = []
    for path, fault in [item for item in found.items() if item[1].keyword == "unknown"]:
        guess = nearest(str(path[-1]), sorted(fault.schema["properties"].keys() - _NOT_ADVISED)) or ""
        right = (*path[:-1], guess)
        if len(guess) > 3:  # `tpu` was not meant for `cpu`
            found[path] = fault._replace(meant=guess)
            if document.get(right) is None and all(isinstance(step, str) for step in path):
                changes += [(path, NOT_GIVEN, ""), (right, document.get(path), document.origin(path))]
                if found.get(right, fault).keyword == "missing":
                    del found[right]
    return found, document.overwritten(*changes) if changes else document


def experiment_problems(document: Document) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings): what a master refuses by its schemas, and what it takes but has deprecated.

    Nothing is judged that only a cluster knows, or that a master refuses in its code as it is submitted.
    ``checkpoint_storage`` counts as completed by the cluster's own of the same type.

    Args:
        document: The experiment configuration, as submitted.
    """
    errors, warnings = in_words(faults_of(document)[0], document), list[Problem]()
    stated, entrypoint = document.get(("entrypoint",)), None
    with contextlib.suppress(EntrypointError):
        entrypoint = read_entrypoint(stated)
    if entrypoint is not None and entrypoint.is_legacy:
        # determined/exec/launch.py starts it by torch_distributed, and pytorch/deepspeed/_trainer.py refuses that.
        message = "names a class, a form that is deprecated by Determined since 0.38"
        if stated == entrypoint.trial:
            message += "; on more than one slot a cluster cannot start a DeepSpeedTrial by it"
        fix = f"write a script for it, e.g. {ENTRYPOINT_FORM.rpartition(' ')[0]} {entrypoint.trial}"
        warnings.append(document.problem(("entrypoint",), message, fix, "deprecated-key"))
    return errors, warnings


# A key that is needed, or takes values of several kinds -> an example of its value.
_EXAMPLES = {
    "entrypoint": ENTRYPOINT_FORM,
    "max_length": "{batches: N}",
    "metric": "validation_loss",
    "searcher": "{name: single, metric: validation_loss}",
    "time_metric": "batches",
}
_NOT_ADVISED = {"agent_label", "data_layer", "gpu", "slots", "user"}  # known, but of no use


def in_words(found: Mapping[KeyPath, Fault], document: Document) -> list[Problem]:
    """Faults as problems, in the order of the file."""
    paths = sorted(found, key=lambda path: (document.origin(path).line, document.origin(path).column))
    return [_problem_of(document, found[path]) for path in paths]


def _problem_of(document: Document, fault: Fault) -> Problem:
    path, keyword, value, detail = fault.path, fault.keyword, fault.value, fault.detail
    key = next((step for step in reversed(path) if isinstance(step, str)), "")
    example = f"write {key}: {_EXAMPLES.get(key, '...')}"
    kinds = [detail] if isinstance(detail, str) else detail
    if keyword == "unknown":
        return document.problem(path, "unknown key", _instead(fault), "unknown-key", value=NOT_GIVEN)
    if keyword in ("pattern", "union"):
        given = " and ".join(sorted(map(str, value))) or "none" if isinstance(value, dict) else kind_of(value)
        return document.problem(path, f"cannot be {given}", example, "wrong-type")
    if keyword == "type" and kinds == ["null"]:
        fix = "write slots_per_trial instead" if key == "slots" else "remove it"
        return document.problem(path, "is no longer a key of an experiment", fix, "removed-key")
    if keyword == "compared":
        relation, other, limit = detail
        wanted = {"a<b": "a number above", "a<=b": "at least"}.get(relation, "a path below")
        fix = f"write {wanted} {other if limit is None else limit}"
        return document.problem(path, f"must be {wanted} {other}", fix, "out-of-range")
    if keyword == "checks":
        message, code = detail, "hyperparameter-spec"
        if isinstance(value, dict) and "grid search" in detail:
            fix = "write count: N, the number of values to try"
        elif isinstance(value, dict) and "type" in value:
            message = "a mapping with a key `type` is read by Determined as a hyperparameter to search"
            wrap = "or wrap the whole hyperparameter: {type: const, val: {...}}"
            fix = f"{one_of((*AXES, 'const'), value['type'])}; {wrap}"
        else:
            fix = "set environment.image" if "Image" in detail else "write another value, or remove it"
            code = "out-of-range"
        return document.problem(path, message, fix, code)
    fix = ""
    if keyword == "missing":
        fix = f"write {key}: {detail[0]}" if isinstance(detail, list) else example
    elif keyword == "type" and key in _EXAMPLES:
        fix = example
    return problem_of(document, fault, fix)


# A key that belongs in one place -> that place, or in several words the fix.
_ELSEWHERE = {
    **{key: f"hyperparameters.{key}" for key in OWN_KEYS},
    **{key: dotted(("hyperparameters", *path)) for key, path in BY_OTHER_NAMES.items()},
    "slots": "resources.slots_per_trial",
    "slots_per_trial": "resources.slots_per_trial",
    "experiment_seed": "reproducibility.experiment_seed",
    "image": "environment.image",
    "environment_variables": "environment.environment_variables",
    "metric": "searcher.metric",
    "deepspeed": "hyperparameters.deepspeed_config",
    "training": "write its values as hyperparameters, lengths and periods below hyperparameters.fit",
}


def _instead(fault: Fault) -> str:
    """What to write instead of an unknown key."""
    *above, word = map(str, fault.path)
    place = _ELSEWHERE.get(word, "")
    if " " in place:
        return place
    if place and place != dotted(fault.path):
        return f"did you mean {place}?"
    if above and word in keys_of("experiment"):
        return f"write {word} at the top level, beside {above[0]}"
    return meant_or_known(fault.meant, sorted(fault.schema["properties"].keys() - _NOT_ADVISED))
