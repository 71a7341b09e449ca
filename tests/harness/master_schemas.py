"""Judge an experiment config just as Determined 0.38.1's master does: by its JSON schemas, and by its code.

The master validates a config twice, with the same schemas (``expconf/v0``) and two sets of keywords:

* *sanity*, on what the user submitted: types, unknown fields, unions, checks;
* *completeness*, once the cluster's and the schemas' defaults are in: also ``eventuallyRequired`` and
  ``eventually``.

The schemas are JSON Schema draft-07 with seven keywords of Determined's own, each a function below. Two facts
shape the rest: a null counts as absent wherever a field is optional, and ``$ref`` hides its neighbours.

Source: determined v0.38.1, ``master/pkg/schemas/{schema,defaults,merge}.go``, ``extensions/*.go`` and
``expconf/*.go`` there; ``master/internal/core_experiment.go``.
"""

from __future__ import annotations

import copy
import functools
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

from jsonschema import Draft7Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.jsonschema import DRAFT7

Json = Any
Errors = Iterator[ValidationError]

SCHEMA_FILE = resources.files("determined_ds") / "experiment/schemas.json"
BASE_URL = "http://determined.ai/schemas/expconf/v0/"
REMOVED_SEARCHERS = ("adaptive", "adaptive_simple", "custom", "sync_halving")
TIMED_SEARCHERS = ("adaptive_asha", "async_halving")


# --- What may be asked --------------------------------------------------------------------------------------


def refusals(config: Json, *, checkpoint_storage: Mapping[str, Json] | None = None) -> list[str]:
    """What the master refuses in an experiment config, in its form ``<config>.dotted.path[0]: what is wrong``.

    Args:
        config: The config, as parsed from YAML.
        checkpoint_storage: The cluster's own, where the config may lean on it; see :func:`fill_defaults`.
    """
    stages = (insane(config), incomplete(config, checkpoint_storage), refused_by_code(config))
    return next(filter(None, map(sorted, stages)), [])


def insane(config: Json) -> Iterator[str]:
    """What the schemas refuse in a config as submitted."""
    try:
        yield from _judged(_SanityValidator, as_json(config))
    except (TypeError, ValueError) as error:
        yield f"<config>: cannot be sent as JSON: {error}"


def incomplete(config: Json, checkpoint_storage: Mapping[str, Json] | None = None) -> Iterator[str]:
    """What the schemas refuse in a sane config once its defaults are filled."""
    yield from _judged(_CompletenessValidator, fill_defaults(config, checkpoint_storage=checkpoint_storage))


def refused_by_code(config: dict[str, Json]) -> Iterator[str]:
    """What the master's code refuses in a sane config, with no schema saying so.

    Only what the config alone can tell, read from the source and not measured on a master.
    """
    resources = config.get("resources") or {}
    seed = (config.get("reproducibility") or {}).get("experiment_seed")
    names = Counter(policy.get("name") for policy in config.get("log_policies") or [])
    if config.get("entrypoint") is None:
        yield "<config>.entrypoint: managed experiments require entrypoint"
    if bool(config.get("workspace")) != bool(config.get("project")):
        yield "<config>: workspace and project must both be included in config if one is provided"
    if resources.get("slots") is not None:
        yield '<config>.resources: additionalProperties "slots" not allowed'
    if isinstance(resources.get("shm_size"), str):
        yield "<config>.resources.shm_size: is read as a number of bytes, though the schema takes a string"
    if seed is not None and seed >= 2**32:
        yield "<config>.reproducibility.experiment_seed: is read as a uint32"
    for device in resources.get("devices") or []:
        if isinstance(device, str) and device.count(":") > 2:
            yield f"<config>.resources.devices: {device} has more than three parts"
    for name in (name for name, count in names.items() if name is not None and count > 1):
        yield f'<config>.log_policies: log_policies have duplicated names "{name}"'
    searcher = config.get("searcher") or {}
    name = searcher.get("name")
    if name in REMOVED_SEARCHERS:
        yield f"<config>.searcher: the '{name}' searcher has been removed, not valid for new experiments"
    if name in TIMED_SEARCHERS and None in (searcher.get("max_time"), searcher.get("time_metric")):
        yield f"<config>.searcher: the `{name}` searcher requires `max_time` and `time_metric` to be set"


def fill_defaults(config: Json, *, checkpoint_storage: Mapping[str, Json] | None = None) -> Json:
    """The config with the defaults that the master would fill in; the argument is left as it was.

    Defaults that the master makes up as it goes (name, seed) are fixed here. Short forms that defaults hang
    on are spelled out as the master does (image, environment variables, devices); others stay as written.

    Args:
        config: The config, as parsed from YAML.
        checkpoint_storage: What the cluster (master or workspace) has under ``checkpoint_storage``; without
            it, a config must bring its own to be complete.
    """
    filled = as_json(config)
    if checkpoint_storage is not None and isinstance(filled, dict):
        given = filled.get("checkpoint_storage")
        filled["checkpoint_storage"] = _merged_storage({} if given is None else given, checkpoint_storage)
    # Go's structs of this one have no fields to fill; its schema refuses those of a storage.
    tensorboard = filled.pop("tensorboard_storage", None) if isinstance(filled, dict) else None
    whole = _filled(EXPERIMENT, filled)
    return whole if tensorboard is None else whole | {"tensorboard_storage": tensorboard}


def as_json(config: Json) -> Json:
    """A copy as the master reads it: keys are strings; NaN, infinities and what JSON cannot say raise."""
    return json.loads(json.dumps(config, allow_nan=False))


# --- The extensions: one function a keyword, called as jsonschema calls its own -----------------------------


def _union(validator: Any, union: Json, instance: Json, _schema: Json) -> Errors:
    """Just one item must match; else the errors of the first whose ``unionKey`` holds, or the message."""
    failures = [(item, list(validator.descend(instance, item))) for item in union["items"]]
    num_valid = sum(not failed for _, failed in failures)
    if num_valid == 1:
        return
    if num_valid > 1:
        yield ValidationError(f"{num_valid} items of a union match, where one must")
        return
    default = [ValidationError(union.get("defaultMessage", "union failed to validate"))]
    pointed_at = (failed for item, failed in failures if _union_key_holds(item["unionKey"], instance))
    yield from next(pointed_at, default)


def _union_key_holds(key: str, instance: Json) -> bool:
    """Whether a ``unionKey`` says that the instance was meant for its item."""
    kind, _, rest = key.partition(":")
    fields = instance if isinstance(instance, dict) else {}
    if kind == "not":
        return not _union_key_holds(rest, instance)
    if kind == "const":
        name, _, value = rest.partition("=")
        return bool(fields.get(name) == value)
    if kind == "type":
        return isinstance(instance, {"array": list, "object": dict}[rest])
    if kind == "singleproperty":
        return list(fields) == [rest]
    if kind == "hasattr":
        return rest in fields
    return {"always": True, "never": False}[kind]


def _checks(validator: Any, checks: Json, instance: Json, _schema: Json) -> Errors:
    """Each subschema must match; its key is the error where it does not."""
    for message, check in checks.items():
        if not validator.evolve(schema=check).is_valid(instance):
            yield ValidationError(message)


def _compare_properties(_validator: Any, rule: Json, instance: Json, _schema: Json) -> Errors:
    """Two properties must compare as said; one missing or of another type is none of its business."""
    if not isinstance(instance, dict):
        return
    a, b = instance.get(rule["a"]), instance.get(rule["b"])
    kind, holds, relation = _COMPARISONS[rule["type"]]
    if all(isinstance(value, kind) and not isinstance(value, bool) for value in (a, b)) and not holds(a, b):
        yield ValidationError(f"{rule['a']} must be {relation} {rule['b']}")


def _is_subdir(path: str, parent: str) -> bool:
    """As the master has it: a relative path that does not climb, or a string with the parent for prefix."""
    path, parent = _clean_path(path), _clean_path(parent)
    return path.startswith(parent) if path.startswith("/") else not path.startswith("..")


def _clean_path(path: str) -> str:
    """Go's ``filepath.Clean``: normpath, but for two leading slashes, which become one."""
    return re.sub(r"^//", "/", posixpath.normpath(path))


_COMPARISONS: dict[str, tuple[Any, Callable[[Any, Any], bool], str]] = {
    "a<b": ((int, float), lambda a, b: a < b, "less than"),
    "a<=b": ((int, float), lambda a, b: a <= b, "less than"),  # the master's words, though equal is fine
    "a_is_subdir_of_b": (str, _is_subdir, "a subdirectory of"),
}


def _disallow_properties(_validator: Any, messages: Json, instance: Json, _schema: Json) -> Errors:
    """Some keys are refused, null or not, each with its own message."""
    if isinstance(instance, dict):
        yield from (ValidationError(message) for key, message in messages.items() if key in instance)


def _optional_ref(validator: Any, ref: Json, instance: Json, _schema: Json) -> Errors:
    """``$ref``, but null is fine."""
    if instance is not None:
        yield from validator.descend(instance, {"$ref": ref})


def _eventually_required(_validator: Any, keys: Json, instance: Json, _schema: Json) -> Errors:
    """``required``, at completeness only, and null does not do."""
    if isinstance(instance, dict):
        missing = (key for key in keys if instance.get(key) is None)
        yield from (ValidationError(f"{key} is a required property") for key in missing)


def _eventually(validator: Any, schema: Json, instance: Json, _schema: Json) -> Errors:
    """A subschema that counts at completeness only."""
    yield from validator.descend(instance, schema)


def _pattern(_validator: Any, pattern: str, instance: Json, _schema: Json) -> Errors:
    """Go's reading of ``pattern``: ``$`` is the very end; Python's also stands before a last newline."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


_SanityValidator = extend(
    Draft7Validator,
    {
        "union": _union,
        "checks": _checks,
        "compareProperties": _compare_properties,
        "disallowProperties": _disallow_properties,
        "optionalRef": _optional_ref,
        "pattern": _pattern,
    },
)
_CompletenessValidator = extend(
    _SanityValidator, {"eventuallyRequired": _eventually_required, "eventually": _eventually}
)


# --- Schemas and verdicts -----------------------------------------------------------------------------------


def _load_schemas() -> dict[str, Json]:
    """The schemas by URL, less ``$schema``: with it jsonschema would swap our validators for its own."""
    loaded = json.loads(SCHEMA_FILE.read_text(encoding="utf-8")).values()
    return {each["$id"]: {key: value for key, value in each.items() if key != "$schema"} for each in loaded}


SCHEMAS = _load_schemas()
EXPERIMENT = SCHEMAS[f"{BASE_URL}experiment.json"]
_REGISTRY: Any = Registry().with_resources(
    (url, DRAFT7.create_resource(schema)) for url, schema in SCHEMAS.items()
)


@functools.cache
def _validator(validator_class: Any) -> Any:
    return validator_class(EXPERIMENT, registry=_REGISTRY)


def _judged(validator_class: Any, instance: Json) -> Iterator[str]:
    for error in _validator(validator_class).iter_errors(instance):
        yield f"{error.json_path.replace('$', '<config>', 1)}: {error.message}"


# --- Defaults -----------------------------------------------------------------------------------------------

IMAGES = {
    "cpu": "determinedai/pytorch-ngc:0.38.1",
    "cuda": "determinedai/pytorch-ngc:0.38.1",
    "rocm": "determinedai/environments:rocm-5.6-pytorch-1.3-tf-2.10-rocm-mpich-0736b6d",
}
LOG_POLICIES = [
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*"},
]

# By schema title: what the master fills in itself, over the schema's own ``default``.
_RUNTIME_DEFAULTS: dict[str, dict[str, Json]] = {
    "ExperimentConfig": {"name": "Experiment (named by the master)"},
    "ReproducibilityConfig": {"experiment_seed": 0},  # the master takes the time
    "EnvironmentImageMap": IMAGES,
    "EnvironmentVariablesMap": {"gpu": None},  # read as cuda, never filled
}


def _filled(schema: Json, value: Json) -> Json:
    """A value with the defaults of its schema, and of every schema that this one hands it on to."""
    if not isinstance(schema, dict):
        return value
    if "$ref" in schema:
        return _filled(SCHEMAS[schema["$ref"]], value)
    value = _SHORT_FORMS.get(schema.get("title", ""), lambda unchanged: unchanged)(value)
    for further in _handed_on_to(schema, value):
        value = _filled(further, value)
    if isinstance(value, dict):
        return _filled_fields(schema, value)
    if isinstance(value, list):
        return [_filled(schema.get("items"), item) for item in value]
    return value


def _handed_on_to(schema: Json, value: Json) -> Iterator[Json]:
    """Further schemas of a value: a reference, a ``then`` whose ``if`` holds, the item that fits a union."""
    if "optionalRef" in schema and value is not None:
        yield SCHEMAS[schema["optionalRef"]]
    if "then" in schema and _is_sane(schema["if"], value):
        yield schema["then"]
    matching = [item for item in schema.get("union", {}).get("items", []) if _is_sane(item, value)]
    yield from matching[:1]


def _is_sane(schema: Json, value: Json) -> bool:
    return bool(_SanityValidator(schema, registry=_REGISTRY).is_valid(value))


def _filled_fields(schema: Json, fields: dict[str, Json]) -> dict[str, Json]:
    properties = schema.get("properties", {})
    defaults = {key: sub.get("default") for key, sub in properties.items() if isinstance(sub, dict)}
    defaults |= _RUNTIME_DEFAULTS.get(schema.get("title", ""), {})
    absent = {key: value for key, value in defaults.items() if value is not None and fields.get(key) is None}
    others = schema.get("additionalProperties")
    whole = fields | copy.deepcopy(absent)
    return {key: _filled(properties.get(key, others), value) for key, value in whole.items()}


def _image_map(image: Json) -> Json:
    """One image for every kind of slot; ``gpu`` is the old name of ``cuda``."""
    return dict.fromkeys(IMAGES, image) if isinstance(image, str) else _gpu_as_cuda(image)


def _variables_map(variables: Json) -> Json:
    """One list for every kind of slot; ``gpu`` is the old name of ``cuda``."""
    return dict.fromkeys(IMAGES, variables) if isinstance(variables, list) else _gpu_as_cuda(variables)


def _gpu_as_cuda(by_slot: Json) -> Json:
    if not isinstance(by_slot, dict) or by_slot.get("gpu") is None:
        return by_slot
    cuda = by_slot["gpu"] if by_slot.get("cuda") is None else by_slot["cuda"]
    return {key: value for key, value in by_slot.items() if key != "gpu"} | {"cuda": cuda}


def _device_maps(devices: Json) -> Json:
    """``/host:/container[:mode]`` is short for a mapping of the three."""
    keys = ("host_path", "container_path", "mode")
    spelled = (dict(zip(keys, d.split(":"), strict=False)) if isinstance(d, str) else d for d in devices)
    return list(spelled) if isinstance(devices, list) else devices


def _with_log_policies(policies: Json) -> Json:
    """The master's own policies come last, each unless one of that name is there."""
    if not isinstance(policies, list):
        return policies
    names = {policy.get("name") for policy in policies if isinstance(policy, dict)}
    return policies + [policy for policy in LOG_POLICIES if policy["name"] not in names]


AZURE_CREDENTIALS = ("connection_string", "account_url", "credential")

# By schema title.
_SHORT_FORMS: dict[str, Callable[[Json], Json]] = {
    "EnvironmentImage": _image_map,
    "EnvironmentVariables": _variables_map,
    "DevicesConfig": _device_maps,
    "LogPoliciesConfig": _with_log_policies,
}


def _merged_storage(given: Json, cluster: Mapping[str, Json]) -> Json:
    """The config's storage over the cluster's: if the types differ, only its ``save_`` counts."""
    if not isinstance(given, dict):
        return given
    mine = {key: value for key, value in given.items() if value is not None}
    if mine.get("type", cluster.get("type")) != cluster.get("type"):
        cluster = {key: value for key, value in cluster.items() if key.startswith("save_")}
    if "connection_string" in mine or "account_url" in mine:  # Azure: credentials come from one place
        cluster = {key: value for key, value in cluster.items() if key not in AZURE_CREDENTIALS}
    return {**cluster, **mine}
