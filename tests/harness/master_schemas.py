"""Judge an experiment config just as Determined 0.38.1's master does: by its JSON schemas, and by its code.

The schemas (``expconf/v0``) are JSON Schema draft-07 with keywords of Determined's own. They are asked twice: of what
was submitted, and once the cluster's and the schemas' defaults are in, with two keywords more. A null counts as absent
wherever a field is optional, and ``$ref`` hides its neighbours. The package itself judges without jsonschema.

Source: determined v0.38.1, ``master/pkg/schemas/{schema,defaults,merge}.go``, ``extensions/*.go`` and
``expconf/*.go`` there; ``master/internal/core_experiment.go``.
"""

from __future__ import annotations

import copy
import json
import operator
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


# --- What may be asked --------------------------------------------------------------------------------------


def refusals(config: Json, *, checkpoint_storage: Mapping[str, Json] | None = None) -> list[str]:
    """What the master of a cluster with this storage refuses in a config, as ``<config>.path[0]: what is wrong``."""
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
    """What the master's code refuses in a sane config, with no schema saying so, as far as its source was read."""
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
    if name in ("adaptive", "adaptive_simple", "custom", "sync_halving"):
        yield f"<config>.searcher: the '{name}' searcher has been removed, not valid for new experiments"
    is_timed = None not in (searcher.get("max_time"), searcher.get("time_metric"))
    if name in ("adaptive_asha", "async_halving") and not is_timed:
        yield f"<config>.searcher: the `{name}` searcher requires `max_time` and `time_metric` to be set"


def fill_defaults(config: Json, *, checkpoint_storage: Mapping[str, Json] | None = None) -> Json:
    """A copy with the defaults that the master fills in; those that it makes up (name, seed) are fixed here.

    Args:
        config: The config, as parsed from YAML.
        checkpoint_storage: The cluster's own; without it, a config must bring its own to be complete.
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
    count = sum(validator.evolve(schema=item).is_valid(instance) for item in union["items"])
    if count != 1:
        yield ValidationError(f"{count} items of a union match, where one must")


def _checks(validator: Any, checks: Json, instance: Json, _schema: Json) -> Errors:
    for message, check in checks.items():
        if not validator.evolve(schema=check).is_valid(instance):
            yield ValidationError(message)


def _compare_properties(_validator: Any, rule: Json, instance: Json, _schema: Json) -> Errors:
    if not isinstance(instance, dict):
        return
    a, b = instance.get(rule["a"]), instance.get(rule["b"])
    kind, holds = _COMPARISONS[rule["type"]]
    if all(isinstance(value, kind) and not isinstance(value, bool) for value in (a, b)) and not holds(a, b):
        yield ValidationError(f"{rule['a']} and {rule['b']} are not {rule['type']}")


def _is_subdir(path: str, parent: str) -> bool:
    """As the master has it: a relative path that does not climb, or a string with the parent for prefix."""
    # Go's filepath.Clean is normpath, but for two leading slashes, which become one.
    path, parent = (re.sub(r"^//", "/", posixpath.normpath(each)) for each in (path, parent))
    return path.startswith(parent) if path.startswith("/") else not path.startswith("..")


_COMPARISONS: dict[str, tuple[Any, Callable[[Any, Any], bool]]] = {
    "a<b": ((int, float), operator.lt),
    "a<=b": ((int, float), operator.le),
    "a_is_subdir_of_b": (str, _is_subdir),
}


def _disallow_properties(_validator: Any, messages: Json, instance: Json, _schema: Json) -> Errors:
    if isinstance(instance, dict):
        yield from (ValidationError(message) for key, message in messages.items() if key in instance)


def _optional_ref(validator: Any, ref: Json, instance: Json, _schema: Json) -> Errors:
    if instance is not None:
        yield from validator.descend(instance, {"$ref": ref})


def _eventually_required(_validator: Any, keys: Json, instance: Json, _schema: Json) -> Errors:
    if isinstance(instance, dict):
        missing = (key for key in keys if instance.get(key) is None)
        yield from (ValidationError(f"{key} is a required property") for key in missing)


def _eventually(validator: Any, schema: Json, instance: Json, _schema: Json) -> Errors:
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


# By URL, less ``$schema``: with it jsonschema would swap our validators for its own.
SCHEMAS: dict[str, Json] = {
    each["$id"]: {key: value for key, value in each.items() if key != "$schema"}
    for each in json.loads(SCHEMA_FILE.read_text(encoding="utf-8")).values()
}
EXPERIMENT = SCHEMAS["http://determined.ai/schemas/expconf/v0/experiment.json"]
_REGISTRY: Any = Registry().with_resources(
    (url, DRAFT7.create_resource(schema)) for url, schema in SCHEMAS.items()
)


def _judged(validator_class: Any, instance: Json) -> Iterator[str]:
    for error in validator_class(EXPERIMENT, registry=_REGISTRY).iter_errors(instance):
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

    def fits(schema: Json) -> bool:
        return bool(_SanityValidator(schema, registry=_REGISTRY).is_valid(value))

    title = schema.get("title", "")
    if title in _SHORT_FORMS:
        value = _SHORT_FORMS[title](value)
    if "optionalRef" in schema and value is not None:
        value = _filled(SCHEMAS[schema["optionalRef"]], value)
    if "then" in schema and fits(schema["if"]):
        value = _filled(schema["then"], value)
    value = _filled(next(filter(fits, schema.get("union", {}).get("items", [])), None), value)
    if isinstance(value, list):
        return [_filled(schema.get("items"), item) for item in value]
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    defaults = {key: sub.get("default") for key, sub in properties.items() if isinstance(sub, dict)}
    defaults |= _RUNTIME_DEFAULTS.get(title, {})
    absent = {key: sub for key, sub in defaults.items() if sub is not None and value.get(key) is None}
    whole = value | copy.deepcopy(absent)
    return {key: _filled(properties.get(key, others), item) for key, item in whole.items()}


def _for_each_kind(value: Json) -> Json:
    """One image or list of variables is for every kind of slot."""
    return dict.fromkeys(IMAGES, value) if isinstance(value, str | list) else value


def _with_log_policies(policies: Json) -> Json:
    """The master's own policies come last, each unless one of that name is there."""
    if not isinstance(policies, list):
        return policies
    names = {policy.get("name") for policy in policies if isinstance(policy, dict)}
    return policies + [policy for policy in LOG_POLICIES if policy["name"] not in names]


# By schema title.
_SHORT_FORMS: dict[str, Callable[[Json], Json]] = {
    "EnvironmentImage": _for_each_kind,
    "EnvironmentVariables": _for_each_kind,
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
        credentials = ("connection_string", "account_url", "credential")
        cluster = {key: value for key, value in cluster.items() if key not in credentials}
    return {**cluster, **mine}
