"""Determined's schemas of an experiment configuration, on jsonschema: what a master refuses, which keys it knows.

The files in ``schema_files`` are those of Determined 0.38.1, unchanged. :data:`EDITS` is what the master's code refuses
beyond them. A null counts as absent wherever a key may be absent.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from determined_ds.config.params import BY_OTHER_NAMES, OWN_KEYS
from determined_ds.documents.document import Document, KeyPath, dotted, get_path, known_here, nearest, one_of
from determined_ds.documents.judging import Fault, faults
from determined_ds.documents.text import JSON_TYPES, bound_words, kind_of, kind_words, type_fix
from determined_ds.errors import NOT_GIVEN, Problem, shown
from determined_ds.experiment.entrypoint import CLASS, ENTRYPOINT_FORM
from determined_ds.experiment.space import invalid_spec

Json = Any
FOLDER = Path(__file__).with_name("schema_files")
SEARCHERS = ("single", "random", "grid", "adaptive_asha", "async_halving")
STORAGES = ("shared_fs", "directory", "s3", "gcs", "azure")
LARGEST_SEED = 2**32 - 1  # the master keeps it in 32 bits
MAX_PROBLEMS = 20
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
    "reproducibility": {"eventuallyRequired": [], "properties.experiment_seed.maximum": LARGEST_SEED},
    # The schema takes "8g"; the struct does not. `slots` is for notebooks and commands.
    "resources": {"properties.shm_size.type": ["integer", "null"], "properties.slots": {"type": "null"}},
    "devices": {"items.union.items.1.pattern": "^/[^:]*:/[^:]*(:[^:]*)?$"},
    "azure": {"checks": {}},  # its credentials are judged in _between_sections
    "searcher-adaptive-asha": {"eventuallyRequired": _ASHA_NEEDS},
    "searcher-async-halving": {"eventuallyRequired": [*_ASHA_NEEDS, "num_rungs"]},
    "searcher": {
        "then.union.items": [
            {"unionKey": f"const:name={name}", "$ref": f"searcher-{name}"} for name in SEARCHERS
        ]
    },
}


@cache
def schema(name: str) -> dict[str, Json]:
    """A schema by its address, or by the name of what it describes, e.g. ``searcher-grid``."""
    name = name.rpartition("/")[2].removesuffix(".json").replace("_", "-")
    found: dict[str, Json] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for place, value in EDITS.get(name, {}).items():
        path = tuple(int(step) if step.isdigit() else step for step in place.split("."))
        get_path(found, path[:-1])[path[-1]] = value
    return found


def keys_of(*names: str) -> frozenset[str]:
    """The keys that the schemas of these names know."""
    return frozenset(key for name in names for key in schema(name)["properties"])


# ------------------------------------------------------------------------------------------------- judging


def faults_of(document: Document) -> tuple[dict[KeyPath, Fault], Document]:
    """The fault of each place, and the document as it was meant.

    A misspelt key is judged further as the one that was meant, unless that is given too, so that neither is its value
    unseen nor the other key missing.
    """
    known: tuple[dict[KeyPath, Fault], Document] | None = document.worked_out.get(FOLDER)
    if known is not None:
        return known
    found, meant = _judged(document.data), document
    back: dict[KeyPath, KeyPath] = {}  # path of a key that was meant -> as it is written
    for path, fault in [item for item in found.items() if item[1].keyword == "unknown"][:MAX_PROBLEMS]:
        guess = nearest(str(path[-1]), sorted(fault.schema["properties"].keys() - _NOT_ADVISED)) or ""
        if len(guess) > 3:  # `tpu` was not meant for `cpu`
            found[path] = fault._replace(meant=guess)
            right = (*path[:-1], guess)
            if document.get(right) is None and all(isinstance(step, str) for step in path):
                back.setdefault(right, path)
    for right, path in back.items():
        changes = [(path, NOT_GIVEN, ""), (right, document.get(path), document.origin(path))]
        meant = meant.overwritten_all(changes)
    if back:
        again = _judged(meant.data)
        found = {path: fault for path, fault in found.items() if fault.keyword == "unknown"}
        for path, fault in again.items():
            at = next((end for end in range(len(path), 0, -1) if path[:end] in back), 0)
            path = (*back[path[:at]], *path[at:]) if at else path
            found.setdefault(path, fault._replace(path=path))
    document.worked_out[FOLDER] = found, meant
    return found, meant


def _judged(config: dict[str, Json]) -> dict[KeyPath, Fault]:
    """One fault a place: the last is the most exact, but for an unknown, a missing and a mistyped one."""
    storage = config.get("checkpoint_storage")
    if isinstance(storage, dict) and "type" not in storage:
        # The cluster's own completes it, which is of the type that fits; its nulls stand for the cluster's values.
        known = keys_of("checkpoint-storage")
        storage = {key: value for key, value in storage.items() if value is not None or key not in known}
        storage["type"] = max(STORAGES, key=lambda kind: len(storage.keys() & keys_of(kind)))
    config = {**config, "checkpoint_storage": storage}
    first = {"unknown": 0, "missing": 1, "type": 2}
    found: dict[KeyPath, Fault] = {}
    for fault in faults(schema("experiment"), config, named=schema):
        path, keyword = fault.path, fault.keyword
        completed = path[:1] == ("checkpoint_storage",) and fault.detail == "eventually"
        if not completed and (
            path not in found or first.get(found[path].keyword, 3) >= first.get(keyword, 3)
        ):
            found[path] = fault
    return found


# ------------------------------------------------------------------------------------------------- problems


def experiment_problems(document: Document) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings): what a Determined master would refuse, and what it takes but has deprecated.

    Nothing is judged that only a cluster knows. ``checkpoint_storage`` counts as completed by the cluster's own
    of the same type, so that a bucket or a path may be missing there.

    Args:
        document: The experiment configuration, as submitted.

    Returns:
        The errors in the order of the file, at most twenty, of which the last then counts the rest; the warnings.
    """
    try:
        faults, _ = faults_of(document)
    except RecursionError:  # beyond what a reader lets pass
        message = "is nested too deep to be judged"
        return [document.problem((), message, "write it more plainly", "invalid")], []
    found: dict[KeyPath, Fault | Problem] = {**faults}
    for path, message, fix, code in _between_sections(document.data):
        if not any(path[:end] in found for end in range(len(path) + 1)):
            found[path] = document.problem(path, message, fix, code)
    errors = in_words(found, document)
    if any(path[:1] == ("entrypoint",) for path in found):
        return errors, []
    said = document.get(("entrypoint",))
    try:
        words = shlex.split(said) if isinstance(said, str) else [*map(str, said or ())]
    except ValueError:
        return errors, []
    trial = next((word for word in words if CLASS.fullmatch(word)), ENTRYPOINT_FORM.split()[-1])
    since = "is deprecated by Determined since 0.38"
    message = f"--trial {since}" if "--trial" in words else ""
    if words == [trial]:
        # determined/exec/launch.py starts it by torch_distributed, and pytorch/deepspeed/_trainer.py refuses that.
        why = "on more than one slot a cluster cannot start a DeepSpeedTrial by it"
        message = f"names a class: that form {since}; {why}"
    fix = f"write a script for it, e.g. {' '.join([*ENTRYPOINT_FORM.split()[:-1], trial])}"
    return errors, [document.problem(("entrypoint",), message, fix, "deprecated-key")] if message else []


def _between_sections(config: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str, str, str]]:
    """What the master refuses in its code: path, message, fix, code. An empty workspace or project counts as none."""
    for key, other in (("project", "workspace"), ("workspace", "project")):
        if config.get(other) and not config.get(key):
            fix = f"write {key}: NAME too, or remove {other}"
            yield (other,), f"is given without {key}", fix, "missing-key"
    first: dict[str, int] = {}
    policies = config.get("log_policies")
    for index, policy in enumerate(policies if isinstance(policies, list) else ()):
        name = policy.get("name") if isinstance(policy, dict) else None
        if isinstance(name, str) and first.setdefault(name, index) != index:
            fix = "give it another name, or remove one"
            yield (
                ("log_policies", index, "name"),
                f"is the name of policy {first[name]} too",
                fix,
                "duplicate-key",
            )
    storage = config.get("checkpoint_storage")
    given = (
        {key for key, value in storage.items() if value is not None} if isinstance(storage, dict) else set()
    )
    if "connection_string" in given and (others := given & {"account_url", "credential"}):
        path = ("checkpoint_storage", "connection_string")
        fix = "keep connection_string, or account_url with credential"
        yield path, f"is given beside {' and '.join(sorted(others))}", fix, "invalid"


# ------------------------------------------------------------------------------------------------- words

# A key that is needed, or takes values of several kinds -> an example of its value.
_EXAMPLES = {
    "action": "cancel_retries",
    "base": "10",
    "bucket": "my-bucket",
    "container_path": "/data",
    "entrypoint": ENTRYPOINT_FORM,
    "environment_variables": "[OMP_NUM_THREADS=1]",
    "host_path": "/data",
    "image": "determinedai/pytorch-ngc:0.38.1",
    "max_length": "{batches: N}",
    "max_time": "1000",
    "max_trials": "16",
    "maxval": "10",
    "metric": "validation_loss",
    "min_validation_period": "{batches: N}",
    "minval": "1",
    "name": "single",
    "num_rungs": "3",
    "searcher": "{name: single, metric: validation_loss}",
    "time_metric": "batches",
    "val": "1",
    "vals": "[1, 2]",
}
# How the messages of the schemas' checks begin -> code and fix.
_CHECKS = {
    "host_path must": ("out-of-range", "write /{value}, or where it is"),
    '"name" must': ("missing-key", "write name: ..., beside pattern"),
    "grid search": ("hyperparameter-spec", "write count: N, the number of values to try"),
    "container Image is": ("out-of-range", "set environment.image, or give another container another name"),
    "this field": ("unknown-key", "remove it: it is for checkpoint_storage"),
}
_NOT_ADVISED = {"agent_label", "data_layer", "gpu", "slots", "user"}  # known, but of no use
_SIZE = re.compile(r"(\d{0,20}\.?\d{1,20}) ?([kmgtp]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def in_words(found: Mapping[KeyPath, Fault | Problem], document: Document) -> list[Problem]:
    """Faults as problems, in the order of the file; at most twenty, of which the last then counts the rest."""
    problems: list[Problem] = []
    paths = sorted(found, key=lambda path: (document.origin(path).line, document.origin(path).column))
    for path in paths if len(paths) <= MAX_PROBLEMS else paths[: MAX_PROBLEMS - 1]:
        fault = found[path]
        if isinstance(fault, Fault):
            code, message, fix = _words(fault, document)
            whole = fault.keyword == "unknown" and isinstance(fault.value, (dict, list))
            value = NOT_GIVEN if whole else document.get(path, NOT_GIVEN)
            fault = document.problem(path, message, fix, code, value=value)
        problems.append(fault)
    if len(problems) < len(paths):
        fix = f"fix these first, and check that {document.name} is the intended file"
        problems.append(document.problem((), f"{len(paths) - len(problems)} more problems", fix, "more"))
    return problems


def _words(fault: Fault, document: Document) -> tuple[str, str, str]:
    """Code, message and fix."""
    path, keyword, value, detail = fault.path, fault.keyword, fault.value, fault.detail
    key = next((step for step in reversed(path) if isinstance(step, str)), "")
    example = f"write {key}: {_EXAMPLES.get(key, '...')}"
    if keyword == "unknown":
        return "unknown-key", *_unknown(fault)
    if keyword == "missing":
        fit = document.get(("hyperparameters", "fit", "max_length"))
        if key == "max_time" and isinstance(fit, dict) and fit:
            example = f"write {key}: {next(iter(fit.values()))}"
        example = f"write {key}: {detail[0]}" if isinstance(detail, list) else example
        is_null = document.get(path, NOT_GIVEN) is None
        return "missing-key", f"{'is null' if is_null else 'missing'}: it is required", example
    if keyword in ("choice", "enum"):
        choices = [each if isinstance(each, str) else shown(each) for each in detail if each is not None]
        message, fix = f"must be one of {', '.join(choices)}", one_of(choices, value)
        if not isinstance(value, str):
            return "wrong-type", f"{message}, not {kind_of(value)}", fix
        return "out-of-range", message, fix
    if bound := bound_words(keyword, detail):
        # The master takes 0 slots; nothing is trained on them.
        return "out-of-range", bound[0], "write 1 or more" if key == "slots_per_trial" else bound[1]
    if keyword == "compared":
        relation, other, limit = detail
        if relation == "a_is_subdir_of_b":
            fix = f"write a relative path without .., or one below {other}"
            return "out-of-range", f"lies outside {other}", fix
        most, fix = ("not be before", f"{limit} or more") if relation == "a<=b" else (
            "be more than", f"a number above {limit:g}, or a smaller {other}")  # fmt: skip
        return "out-of-range", f"must {most} {other}, which is {limit:g}", f"write {fix}"
    if keyword == "checks":
        for beginning, (code, fix) in _CHECKS.items():
            if detail.startswith(beginning):
                return code, detail, fix.replace("{value}", str(value))
        if isinstance(value, dict) and "type" in value:
            return "hyperparameter-spec", *invalid_spec(value)
        return "out-of-range", detail, "write another value, or remove it"
    if keyword == "pattern":
        return "out-of-range", "names no device on the host and in the container", example
    if keyword == "union" and isinstance(value, dict):
        given = " and ".join(sorted(map(str, value))) or "none"
        return "invalid", f"must be given in one unit, and is in {given}", example
    if keyword == "union":
        return "wrong-type", f"cannot be {kind_of(value)}", example
    kinds = [JSON_TYPES[kind] for kind in ([detail] if isinstance(detail, str) else detail) if kind != "null"]
    if not kinds:
        if key == "slots":
            return "unknown-key", "unknown key in an experiment", "did you mean resources.slots_per_trial?"
        return "removed-key", "has been removed from Determined", "remove it"
    return (
        "wrong-type",
        kind_words(detail, value)[0],
        example if kinds[1:] else _type_fix(kinds[0], path, value),
    )


def _type_fix(kind: type, path: KeyPath, value: Any) -> str:
    """How to write a value of the right type. A key that is a string can be named; what is in a list has none."""
    key, is_bool = path[-1] if path else "", isinstance(value, bool)
    is_number = isinstance(value, (int, float)) and not is_bool
    name = f"{key}: " if isinstance(key, str) else ""
    if key == "shm_size" and isinstance(value, str):
        found = _SIZE.fullmatch(value)
        num_bytes = int(float(found[1]) * 1024 ** " kmgtp".index(found[2].lower() or " ")) if found else 0
        return f"write {num_bytes}" if 0 < num_bytes < 2**63 else "write e.g. 8589934592"
    if kind is str and "environment_variables" in path and isinstance(value, dict):
        variable, given = next(iter(value.items()), ("NAME", "VALUE"))
        return f"write {variable}={given}"
    if kind is str and (is_bool or is_number):
        return f'put it in quotes: "{str(value).lower() if is_bool else value}"'
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"remove the quotes: {value.lower()}"
    if kind is list:
        return f"write {name}[{value if is_number or isinstance(value, str) else '...'}]"
    if kind is dict:
        example = _EXAMPLES.get(str(key), "{...}")
        return f"write {name}{example.replace('N', str(value)) if isinstance(value, int) else example}"
    if kind is int and isinstance(value, float) and abs(value) <= 2**53:
        return f"write {round(value)}{', or use type: double' if key in ('minval', 'maxval') else ''}"
    return type_fix(kind, value)


_AS_HYPERPARAMETERS = "write its values as hyperparameters, lengths and periods below hyperparameters.fit"
_IN_JSON = (
    "write it in the DeepSpeed JSON of hyperparameters.deepspeed_config, or below overwrite_deepspeed_args"
)


@cache
def _elsewhere() -> dict[str, str]:
    """A key -> where it belongs, or in several words the fix, for those that belong in one place."""
    sections = (
        "environment optimizations profiling retention_policy checkpoint_storage reproducibility resources"
    )
    searchers = keys_of(*(f"searcher-{name}" for name in SEARCHERS)) - {"name"}
    return {
        **{
            key: f"{section}.{key}"
            for section in sections.split()
            for key, sub in schema(section)["properties"].items()
            if sub is not True  # of one type of storage
        },
        **{key: f"hyperparameters.{key}" for key in OWN_KEYS},
        **{key: f"searcher.{key}" for key in searchers},
        "slots": "resources.slots_per_trial",
        **{key: dotted(("hyperparameters", *path)) for key, path in BY_OTHER_NAMES.items()},
        "deepspeed": "hyperparameters.deepspeed_config",
        **dict.fromkeys(("training", "model"), _AS_HYPERPARAMETERS),
        **dict.fromkeys(("zero_optimization", "optimizer", "scheduler"), _IN_JSON),
        **{key: key for key in keys_of("experiment") if key != "name"},
    }


def _unknown(fault: Fault) -> tuple[str, str]:
    """Message and fix."""
    *above, word = (str(step) for step in fault.path)
    tag, kinds = {"searcher": ("name", SEARCHERS), "checkpoint_storage": ("type", STORAGES)}.get(
        dotted(above), ("", ())
    )
    keys = {kind: keys_of(f"searcher-{kind}" if tag == "name" else kind) for kind in kinds}
    having = [kind for kind, known in keys.items() if word in known]
    own = fault.schema["properties"].get(tag, {})
    if having and isinstance(own, dict) and own.get("const") in kinds:
        what = "searcher" if tag == "name" else "storage"
        message = f"unknown key: the {own['const']} {what} does not have it"
        return message, f"remove it, or use {what} {' or '.join(having)}"
    place = _elsewhere().get(word, "")
    guess = fault.meant or nearest(word, sorted(frozenset().union(*keys.values())))
    if " " in place:
        return "unknown key", place
    if place and place.rpartition(".")[0] != dotted(above):
        at_top = f"write {word} at the top level, beside {above[0]}" if above else ""
        return "unknown key", f"did you mean {place}?" if "." in place else at_top
    if guess:
        return "unknown key", f"did you mean {guess!r}?"
    return "unknown key", known_here(sorted(fault.schema["properties"].keys() - _NOT_ADVISED))
