"""What the master's schemas and its code accept and refuse, extension by extension; the package's verdict is theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.master_code import create_errors
from tests.harness.master_schemas import (
    BASE_URL,
    SCHEMAS,
    completeness_errors,
    errors,
    sanity_errors,
)
from tests.package import schema_problems

Json = Any

LAUNCH = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train"
STORAGE = {"type": "shared_fs", "host_path": "/ckpt"}
SINGLE = {"name": "single", "metric": "loss"}
ASHA = {"name": "adaptive_asha", "metric": "loss", "max_trials": 8, "max_time": 100, "time_metric": "batches"}
RANGE = {"type": "int", "minval": 1, "maxval": 4}
INLINE = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
AZURE = {"type": "azure", "container": "c"}
MOUNT = {"host_path": "/data", "container_path": "/data"}

GOOD: dict[str, Json] = {
    "name": "gpt2",
    "description": "a full config",
    "labels": ["deepspeed"],
    "workspace": "lab",
    "project": "gpt2",
    "entrypoint": f"{LAUNCH} model_defs.gpt2.trial:GPT2Trial",
    "bind_mounts": [{**MOUNT, "read_only": True}],
    "checkpoint_policy": "best",
    "checkpoint_storage": {**STORAGE, "storage_path": "checkpoints", "save_trial_best": 1},
    "environment": {
        "image": {"cuda": "cuda-image", "cpu": "cpu-image"},
        "environment_variables": ["OMP_NUM_THREADS=1"],
        "pod_spec": {"spec": {"containers": [{"name": "sidecar", "image": "anything"}]}},
    },
    "hyperparameters": {
        "global_batch_size": 32,
        "learning_rate": {"type": "log", "base": 10, "minval": -5, "maxval": -3},
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": {"type": "categorical", "vals": [1, 2]}}},
        "fit": {"max_length": {"batches": 200}},
    },
    "max_restarts": 0,
    "min_validation_period": {"batches": 50},
    "profiling": {"enabled": True, "begin_on_batch": 5, "end_after_batch": 5},
    "reproducibility": {"experiment_seed": 7},
    "resources": {"slots_per_trial": 2, "devices": ["/dev/infiniband:/dev/infiniband:rw"], "priority": 42},
    "searcher": ASHA,
}
ABSENT = object()


def with_value(path: str, value: Json) -> dict[str, Json]:
    """The good config with one value, at a dotted path, set to another, or taken out."""
    config = copy.deepcopy(GOOD)
    *parents, key = path.split(".")
    part = config
    for parent in parents:
        part = part.setdefault(parent, {})
    part[key] = value
    if value is ABSENT:
        del part[key]
    return config


def searched(hyperparameter: Json, **searcher: Json) -> dict[str, Json]:
    """A config with one hyperparameter, and a searcher that is not adaptive ASHA."""
    return {**GOOD, "searcher": {"metric": "loss", **searcher}, "hyperparameters": {"h": hyperparameter}}


H, STORED, STORED_AT, IN_POD = (
    "hyperparameters.h",
    "checkpoint_storage",
    "checkpoint_storage.storage_path",
    "environment.pod_spec",
)
# A path into the good config, or "" -> each of the values that may stand there; of "", whole configs.
ACCEPTED: dict[str, list[Json]] = {
    "": [GOOD, searched(RANGE | {"count": 2}, name="grid"), searched(RANGE, **SINGLE)],
    "entrypoint": ["python3 train.py", ["python3", "train.py"]],
    "max_restarts": [2.0],
    "min_validation_period": [{"records": 1}, {"epochs": 1}, {"batches": 0}],
    "environment.image": ["one", {"cpu": "a"}, {"gpu": "old"}, None],
    H: [
        *(None, 3, "text", [1, {"any": "thing"}]),
        [{"type": "AdamW"}],  # a list hides a type
        {"nested": {"deep": {"type": "int", "minval": 1, "maxval": 2}}},
        {"type": "const", "val": None},
        {"type": "const", "val": INLINE},
        {"type": "categorical", "vals": [INLINE, 1]},
        {"type": "categorical", "vals": []},  # the schema says minLength, which is for strings
        {"type": "double", "minval": 0.0, "maxval": 0.5, "count": None},
    ],
    "profiling": [{"begin_on_batch": 6}],
    # /ckptfile too: the master compares the strings.
    STORED_AT: [None, "/ckpt/runs", "/ckpt", "//ckpt/runs", "a/../b", "/ckptfile"],
    STORED: [
        {"type": "directory", "container_path": "/tmp"},
        {"type": "s3", "bucket": "b", "prefix": "a/./b"},
        {"type": "gcs", "bucket": "b", "prefix": None},
        {**AZURE, "connection_string": "s"},
        {**AZURE, "account_url": "u"},
    ],
    "resources.shm_size": [1, None],
    "log_policies": [[{"name": "n"}], [{"pattern": "p", "action": {"type": "exclude_node"}}]],
    "security": [{"kerberos": None}, {"kerberos": {"config_file": "f"}}],
    **{key: [ABSENT] for key in ("name", "hyperparameters", "reproducibility", "environment")},
}

# Path, values, and a piece of each error that is found, in their order.
INSANE: list[tuple[str, list[Json], list[str]]] = [
    ("version", [0], ["'version' was unexpected"]),
    ("labels", [["a", 1]], ["<config>.labels[1]: "]),
    ("resources.gpus", [2], ["<config>.resources: "]),
    ("max_restarts", [-1, True, "3"], ["<config>.max_restarts: "]),
    ("scheduling_unit", [0], ["<config>.scheduling_unit: "]),
    ("checkpoint_policy", ["latest"], ["<config>.checkpoint_policy: "]),
    ("resources.priority", [100], ["<config>.resources.priority: "]),
    ("hyperparameters", [[]], 2 * ["<config>.hyperparameters: "]),
    ("environment.ports", [{"web": "80"}], ["<config>.environment.ports.web: "]),
    ("entrypoint", [["python3", 3], {"script": "train.py"}, 3], ["entrypoint"]),
    (
        "",
        [{**with_value("debug", "no"), "epochs": 3}],
        ["<config>.debug: 'no' is not of", "'epochs' was unexpected"],
    ),
    # Unions
    ("searcher", [{"name": "bayesian", "metric": "loss"}], ["object[\"name\"] is one of 'single'"]),
    ("searcher", [ASHA | {"mode": "bold", "max_trials": 0}], ["searcher.max_trials: ", "searcher.mode: "]),
    ("searcher", [SINGLE | {"max_trials": 4}], ["'max_trials' was unexpected"]),
    ("min_validation_period", [{}, {"steps": 1}, {"batches": 1, "epochs": 1}], ["one attribute named"]),
    ("min_validation_period", [{"batches": -1}], ["<config>.min_validation_period.batches: "]),
    ("environment.image", [{"tpu": "a"}], ["image: is neither a string nor a map of cpu, cuda, or rocm"]),
    # Hyperparameters
    ("hyperparameters.deepspeed_config", [INLINE], ["deepspeed_config.optimizer: "]),
    (H, [{"type": "int", "minval": 1}], ["'maxval' is a required property"]),
    (H, [{"type": "int", "minval": 1, "maxval": 2.5}], ["h.maxval: "]),
    (H, [{"type": "log", "minval": 1, "maxval": 2, "base": 0}], ["h.base: "]),
    (H, [{"type": "categorical"}, {"type": "const"}, {"type": "const", "val": 1, "vals": [1]}], ["h: "]),
    (H, [{"type": "int", "minval": 1, "maxval": 2, "count": 0}], ["h.count: "]),
    (
        "",
        [
            *(searched(h, name="grid") for h in (RANGE, {"nested": RANGE}, [RANGE], RANGE | {"count": None})),
            searched(RANGE),  # the schema's if asks only about a name that is there
        ],
        [": grid search is in use but count was not provided"],
    ),
    # Properties that are compared
    (
        H,
        [
            {"type": kind, "minval": 2, "maxval": maxval, **base}
            for kind, base in (("int", {}), ("double", {}), ("log", {"base": 10}))
            for maxval in (1, 2)
        ],
        ["minval must be less than maxval"],
    ),
    (H, [{"type": "int", "minval": "9", "maxval": 1}], ["h.minval: "]),
    ("profiling", [{"begin_on_batch": 6, "end_after_batch": 5}], ["begin_on_batch must be less than"]),
    (
        STORED_AT,
        ["..", "../runs", "a/../../b", "/runs", "/ckpt/a/../../runs"],
        ["must either be a relative directory or a subdirectory of host_path"],
    ),
    # Checks, and properties that are not allowed
    (
        "bind_mounts",
        [[{"host_path": "data", "container_path": "."}]],
        ['container_path must not be "."', "host_path must be an absolute path"],
    ),
    ("resources.shm_size", ["giga", "1.gb", "1 gi", "8g\n"], [".shm_size: must be a valid memory size"]),
    ("log_policies", [[{"pattern": "p"}]], ['"name" must be set']),
    (IN_POD, [{"name": None}], ["<config>.environment.pod_spec: pod Name is not a configurable option"]),
    (
        "environment.pod_spec.spec.containers",
        [[{"name": "a", "image": "b"}, {"name": "determined-container", "image": "a"}]],
        ["<config>.environment.pod_spec.spec.containers[1]: container Image is not"],
    ),
    ("security", [{"kerberos": {"config_file": 1}}], ["<config>.security.kerberos.config_file: "]),
    (
        STORED,
        [
            {"type": "hdfs"},
            {"type": "s3", "bucket": "b", "prefix": "a/../b"},
            {"type": "gcs", "bucket": "b", "prefix": ".."},
            {"type": "gcs", "bucket": "b", "host_path": "/ckpt"},
            {"type": "azure", "connection_string": "s", "credential": "c"},
            {"type": "shared_fs", "host_path": "/ckpt", "save_trial_best": -1},
            {"bucket_name": "b"},
        ],
        ["<config>.checkpoint_storage"],
    ),
]

# Fine at submission, for the cluster may fill it in; refused where nothing has.
INCOMPLETE: list[tuple[str, list[Json], str]] = [
    (STORED, [ABSENT], "<config>: checkpoint_storage is a required property"),
    ("searcher", [{"name": "single"}, {"name": "single", "metric": None}], ".searcher: metric is a required"),
    ("", [searched(1)], "<config>.searcher: name is a required property"),
    ("", [{key: GOOD[key] for key in ("entrypoint", STORED)}], "<config>: searcher is a required property"),
    ("searcher", [ASHA | {"max_trials": None}], "<config>.searcher: max_trials is a required property"),
    (STORED, [AZURE], "Exactly one of connection_string or account_url must be set"),
    (STORED, [{}, {"type": "shared_fs"}, {"type": "s3"}, {"save_trial_best": 2}], ""),
]

# Refused by the master's code, of which its schemas say nothing.
UNCREATABLE: list[tuple[str, list[Json], str]] = [
    ("entrypoint", [None], "require entrypoint"),
    ("project", [""], "workspace and project must both"),
    ("resources.slots", [2], '"slots" not allowed'),
    ("resources.shm_size", ["1", "8g", "1.5 gb", "128MiB"], "number of bytes"),
    ("reproducibility.experiment_seed", [2**32], "uint32"),
    ("searcher.max_time", [None], "requires `max_time` and `time_metric`"),
    ("searcher", [{"name": "custom", "metric": "loss"}], "has been removed"),
    ("log_policies", [[{"name": "n"}, {"name": "n", "pattern": "p"}]], "duplicated names"),
]


def configs(path: str, values: list[Json]) -> list[Json]:
    return [with_value(path, value) if path else value for value in values]


@pytest.mark.parametrize(("path", "values"), ACCEPTED.items(), ids=ACCEPTED)
def test_accepted(path: str, values: list[Json]) -> None:
    for config in configs(path, values):
        before = copy.deepcopy(config)
        assert errors(config) == create_errors(config) == schema_problems(config)[0] == []
        assert config == before


@pytest.mark.parametrize(("path", "values", "said"), INSANE)
def test_refused_at_once(path: str, values: list[Json], said: list[str]) -> None:
    for config in configs(path, values):
        found = sanity_errors(config)
        assert all(words in error for words, error in zip(said, found, strict=True)), found
        assert create_errors(config) == found
        assert schema_problems(config)[0]


@pytest.mark.parametrize(("path", "values", "said"), INCOMPLETE)
def test_refused_if_it_stays_so(path: str, values: list[Json], said: str) -> None:
    for config in configs(path, values):
        assert sanity_errors(config) == []
        assert said in completeness_errors(config)[0]


@pytest.mark.parametrize(("path", "values", "said"), UNCREATABLE)
def test_refused_beside_the_schemas(path: str, values: list[Json], said: str) -> None:
    for config in configs(path, values):
        assert errors(config) == []
        [error] = create_errors(config)
        assert said in error
        assert schema_problems(config)[0]


@pytest.mark.parametrize("given", [None, {}, {"save_trial_best": 2}, {"type": "shared_fs"}])
def test_the_clusters_own_storage_completes_it(given: Json) -> None:
    assert errors(with_value("checkpoint_storage", given), checkpoint_storage=STORAGE) == []


def subschemas(schema: Json) -> Iterator[dict[str, Json]]:
    """A schema and every schema within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [
        schema[key]
        for key in ("if", "then", "not", "items", "additionalProperties", "eventually")
        if key in schema
    ]
    inner += [sub for key in ("allOf", "anyOf", "oneOf") for sub in schema.get(key, [])]
    inner += [sub for key in ("properties", "checks") for sub in schema.get(key, {}).values()]
    for sub in [*inner, *schema.get("union", {}).get("items", [])]:
        yield from subschemas(sub)


def test_every_keyword_and_every_reference_of_the_schemas_is_known() -> None:
    known = """additionalProperties allOf anyOf const enum exclusiveMinimum if items maximum minLength minimum not
        oneOf pattern properties required then type $ref $id title $comment default unionKey union checks
        compareProperties disallowProperties optionalRef eventuallyRequired eventually"""
    every = [sub for schema in SCHEMAS.values() for sub in subschemas(schema)]
    assert {keyword for sub in every for keyword in sub} <= set(known.split())
    assert {sub[key] for sub in every for key in ("$ref", "optionalRef") if key in sub} <= set(SCHEMAS)
    assert BASE_URL + "experiment.json" in SCHEMAS
    assert len(SCHEMAS) > 50
