"""What a schema refuses, in this package's words: what is wrong, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from determined_ds.documents.document import known_here, nearest, one_of
from determined_ds.documents.values import JSON_TYPES, KINDS, MAX_EXACT, kind_of, type_fix
from determined_ds.errors import shown
from determined_ds.experiment.entrypoint import ENTRYPOINT_FORM
from determined_ds.experiment.experiment import ELSEWHERE, SEARCHERS
from determined_ds.experiment.schema.judge import Fault, kinds_of
from determined_ds.experiment.schema.of_master import STORAGES, keys_of, schema
from determined_ds.experiment.space.space import invalid_spec


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


BOUNDS = {
    "minimum": ("must be {} or more", "write {} or more"),
    "exclusiveMinimum": ("must be more than {}", "write more than {}"),
    "maximum": ("must be at most {}", "write {} or less"),
}
# A key that is needed -> why, and an example of its value.
NEEDED = {
    "base": ("the range is of its powers", "10"),
    "bucket": ("this type of storage needs one", "my-bucket"),
    "container_path": ("it is the path inside the container", "/data"),
    "entrypoint": ("it says which trial to train", ENTRYPOINT_FORM),
    "host_path": ("it is the path on the machine", "/data"),
    "log_retention_days": ("-1 keeps the logs for ever", "90"),
    "max_time": ("trials are stopped at that much of time_metric", "1000"),
    "max_trials": ("it is the number of trials to run", "16"),
    "maxval": ("a range has two ends", "10"),
    "metric": ("it names the validation metric to search by", "validation_loss"),
    "minval": ("a range has two ends", "1"),
    "name": ("it says how hyperparameters are chosen", "single"),
    "num_rungs": ("it is the number of rungs to stop at", "3"),
    "proxy_port": ("it is the port to expose", "8080"),
    "searcher": ("it names the metric to judge trials by", "{name: single, metric: validation_loss}"),
    "time_metric": ("it names the metric that max_time is in", "batches"),
    "type": ("it decides the rest", ""),
    "val": ("a constant has a value", "1"),
    "vals": ("it lists the values to try", "[1, 2]"),
}
# A key with values of several kinds -> what it takes, and how to write it.
DEVICE_FORM = "write e.g. /dev/infiniband:/dev/infiniband:rwm"
SEVERAL = {
    "action": ("cancel_retries or exclude_node", "write action: cancel_retries"),
    "devices": ("a string or a mapping of host_path and container_path", DEVICE_FORM),
    "entrypoint": ("a command, as a string or a list of strings", f"write: {ENTRYPOINT_FORM}"),
    "environment_variables": (
        "a list of NAME=VALUE, or a mapping of cpu, cuda or rocm to such lists",
        "write e.g. environment_variables: [OMP_NUM_THREADS=1]",
    ),
    "image": (
        "a string or a mapping of cpu, cuda or rocm",
        "write e.g. image: determinedai/pytorch-ngc:0.38.1",
    ),
    "max_length": ("an integer or {batches: N}", "write {batches: N}"),
}
# How the schemas' own messages begin, of what they check beside types and bounds -> what is said instead.
IN_OWN_CONTAINER = "is Determined's to set in its own container"
ANOTHER_CONTAINER = "or, if another container is intended, give that another name"
CHECKS = {
    "host_path must": Words(
        code="out-of-range", message="must be an absolute path", fix="write /{value}, or where it is"
    ),
    "container_path must": Words(
        code="out-of-range",
        message="must not be the working directory itself",
        fix="write the path of a folder, e.g. data",
    ),
    "prefix cannot": Words(
        code="out-of-range", message="climbs by ..", fix="write a prefix without .. in it"
    ),
    '"name" must': Words(
        code="missing-key", message="a log policy needs a name", fix="write name: ..., beside pattern"
    ),
    "grid search": Words(
        code="hyperparameter-spec",
        message="has no count, and a grid search needs one of every range",
        fix="write count: N, the number of values to try",
    ),
    "pod": Words(code="out-of-range", message="is Determined's to set in a pod", fix="remove it"),
    "container Image is": Words(
        code="out-of-range", message=IN_OWN_CONTAINER, fix=f"set environment.image, {ANOTHER_CONTAINER}"
    ),
    "container": Words(code="out-of-range", message=IN_OWN_CONTAINER, fix=f"remove it, {ANOTHER_CONTAINER}"),
    "this field": Words(
        code="unknown-key", message="unknown key: it is for checkpoint_storage", fix="remove it"
    ),
}
# A searcher or a storage that was removed -> the one to use.
REMOVED = {
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "custom": "random",
    "sync_halving": "async_halving",
    "hdfs": "shared_fs",
}
NOT_ADVISED = {"agent_label", "data_layer", "gpu", "slots", "user"}  # known, but of no use
LARGEST_SIZE = 2**63 - 1
SIZE = re.compile(r"(\d{0,20}\.?\d{1,20}) ?([kmgtp]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def worded(fault: Fault) -> Words:
    """The words of a fault."""
    return BY_KEYWORD[fault.keyword](fault)


def _key(fault: Fault) -> str:
    """The key of a value, or of the list that it is in."""
    return next((step for step in reversed(fault.path) if isinstance(step, str)), "")


def _missing(fault: Fault) -> Words:
    key = _key(fault)
    why, example = NEEDED.get(key, ("it is needed", "..."))
    example = fault.detail[0] if fault.detail else example
    return Words(code="missing-key", message=f"{fault.keyword}: {why}", fix=f"write {key}: {example}")


def _choice(fault: Fault) -> Words:
    values = fault.detail or [value for value in fault.schema["enum"] if value is not None]
    choices = [value if isinstance(value, str) else shown(value) for value in values]
    value, message, fix = fault.value, f"must be one of {', '.join(choices)}", one_of(choices, fault.value)
    if not isinstance(value, str):
        return Words(code="wrong-type", message=f"{message}, not {kind_of(value)}", fix=fix)
    if REMOVED.get(value) in choices:
        what = "searcher" if value != "hdfs" else "storage"
        fix = f"use {REMOVED[value]}, or another of {', '.join(choices)}"
        return Words(
            code="removed-key", message=f"the {value} {what} has been removed from Determined", fix=fix
        )
    return Words(code="out-of-range", message=message, fix=fix)


def _out_of_bounds(fault: Fault) -> Words:
    message, fix = BOUNDS[fault.keyword]
    bound = fault.schema[fault.keyword]
    number = f"{bound:g}" if bound < 1e6 else str(bound)
    if _key(fault) == "slots_per_trial":  # the master takes 0, and nothing is trained on it
        fix = "write 1 or more"
    return Words(code="out-of-range", message=message.format(number), fix=fix.format(number))


def _compared(fault: Fault) -> Words:
    """The end of a range or of what is profiled, and a path."""
    (other, bound), relation = fault.detail, fault.schema["compareProperties"]["type"]
    if relation == "a_is_subdir_of_b":
        message, fix = f"lies outside {other}", f"write a relative path without .., or one below {other}"
    elif relation == "a<=b":
        message, fix = f"must not be before {other}, which is {bound:g}", f"write {bound} or more"
    else:
        message = f"must be more than {other}, which is {bound:g}"
        fix = f"write a number above {bound:g}, or a smaller {other}"
    return Words(code="out-of-range", message=message, fix=fix)


def _checked(fault: Fault) -> Words:
    for beginning, words in CHECKS.items():
        if fault.detail.startswith(beginning):
            return replace(words, fix=words.fix.replace("{value}", str(fault.value)))
    message, fix = invalid_spec(fault.value)
    return Words(code="hyperparameter-spec", message=message, fix=fix)


def _no_device(_: Fault) -> Words:
    message = "names no device on the host and in the container"
    return Words(code="out-of-range", message=message, fix=DEVICE_FORM)


def _of_no_item(fault: Fault) -> Words:
    if not isinstance(fault.value, dict):
        return _of_several(fault)
    given = " and ".join(sorted(fault.value)) or "none"
    fix = "write one of {batches: N}, {records: N}, {epochs: N}"
    return Words(code="invalid", message=f"must be given in one unit, and is in {given}", fix=fix)


def _of_several(fault: Fault) -> Words:
    expected, fix = SEVERAL[_key(fault)]
    return Words(code="wrong-type", message=f"must be {expected}, not {kind_of(fault.value)}", fix=fix)


def _wrong_type(fault: Fault) -> Words:
    key, value = fault.path[-1] if fault.path else "", fault.value
    kinds = [JSON_TYPES[kind] for kind in kinds_of(fault.schema) if kind != "null"]
    if len(kinds) > 1:
        return _of_several(fault)
    if key == "slots":
        message = "unknown key: it is for notebooks and commands, not for experiments"
        return Words(code="unknown-key", message=message, fix="did you mean resources.slots_per_trial?")
    if not kinds:
        return Words(code="removed-key", message="has been removed from Determined", fix="remove it")
    if key == "shm_size" and isinstance(value, str):
        message = "must be a number of bytes, not a string"
        return Words(code="wrong-type", message=message, fix=_bytes_fix(value))
    if kinds == [str] and "environment_variables" in fault.path and isinstance(value, dict):
        name, given = next(iter(value.items()), ("NAME", "VALUE"))
        message = "must be NAME=VALUE, not a mapping"
        return Words(code="wrong-type", message=message, fix=f"write {name}={given}")
    fix = _type_fix(kinds[0], key, value)
    if fault.schema.get("optionalRef", "").endswith("length.json") and isinstance(value, int):
        fix = f"write {key}: {{batches: {value}}}"
    elif kinds[0] is dict and key in NEEDED:
        fix = f"write {key}: {NEEDED[str(key)][1]}"
    return Words(code="wrong-type", message=f"must be {KINDS[kinds[0]]}, not {kind_of(value)}", fix=fix)


def _bytes_fix(size: str) -> str:
    found = SIZE.fullmatch(size)
    num_bytes = int(Fraction(found[1]) * 1024 ** " kmgtp".index(found[2].lower() or " ")) if found else 0
    return f"write {num_bytes}" if 0 < num_bytes <= LARGEST_SIZE else "write e.g. 8589934592"


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


def _unknown(fault: Fault) -> Words:
    *above, word = (str(step) for step in fault.path)
    what, kinds = _kinds(above)
    having = [kind for kind, keys in kinds.items() if word in keys]
    own = fault.schema["properties"].get(DECIDING.get(what, ""), {})
    if having and own.get("const") in kinds:
        message = f"unknown key: the {own['const']} {what} does not have it"
        fix = f"remove it, or use {what} {' or '.join(having)}"
        return Words(code="unknown-key", message=message, fix=fix)
    known = sorted(fault.schema["properties"].keys() - NOT_ADVISED)
    place = _elsewhere().get(word, "")
    guess = nearest(word, known) or nearest(word, sorted(frozenset().union(*kinds.values())))
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


DECIDING = {"searcher": "name", "storage": "type"}


def _kinds(above: list[str]) -> tuple[str, dict[str, frozenset[str]]]:
    """Of a section that is of one of several kinds: what it is, and the keys of each kind."""
    if above == ["searcher"]:
        return "searcher", {name: keys_of(f"searcher-{name}") for name in SEARCHERS}
    if above == ["checkpoint_storage"]:
        return "storage", {name: keys_of(name) for name in STORAGES}
    return "", {}


@cache
def _elsewhere() -> dict[str, str]:
    """A key -> where it belongs, for those that belong in one place."""
    sections = ("environment", "optimizations", "profiling", "retention-policy", "checkpoint-storage")
    below = {
        key: f"{name.replace('-', '_')}.{key}"
        for name in sections
        for key, sub in schema(name)["properties"].items()
        if sub is not True  # of one type of storage
    }
    top = {key: key for key in keys_of("experiment") if key != "name"}
    return {**below, **ELSEWHERE, **top}


BY_KEYWORD: dict[str, Callable[[Fault], Words]] = {
    "unknown": _unknown,
    "missing": _missing,
    "null": _missing,
    "type": _wrong_type,
    "enum": _choice,
    "choice": _choice,
    **dict.fromkeys(BOUNDS, _out_of_bounds),
    "compared": _compared,
    "checks": _checked,
    "disallowed": _checked,
    "pattern": _no_device,
    "union": _of_no_item,
}
