"""What a master accepts and refuses, of configurations as they are written and of damaged ones: our verdict is its own.

All verdicts are those of a master of Determined 0.38.1 with a shared file system, asked on 2026-11-27 to validate each
configuration and to create nothing.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from tests.harness.damaging import damaged, paths_in
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
    """The good config with one value, at a dotted path, set to another or taken out."""
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
        # What is missing is the cluster's; of the last two, that of a cluster with such a storage.
        *(ABSENT, {}, {"type": "shared_fs"}, {"save_trial_best": 2}, {"type": "s3"}, AZURE),
    ],
    "resources.shm_size": [1, None],
    "log_policies": [[{"name": "policy"}], [{"pattern": "p", "action": {"type": "exclude_node"}}]],
    "security": [{"kerberos": None}, {"kerberos": {"config_file": "f"}}],
    **{key: [ABSENT] for key in ("name", "hyperparameters", "reproducibility", "environment")},
}

REFUSED: dict[str, list[Json]] = {
    "": [
        {**GOOD, "epochs": 3},
        *(
            searched(each, name="grid")
            for each in (RANGE, {"nested": RANGE}, [RANGE], RANGE | {"count": None})
        ),
        searched(RANGE),  # the schema's if asks only about a name that is there
    ],
    "version": [0],
    "labels": [["a", 1]],
    "resources.gpus": [2],
    "max_restarts": [-1, True, "3"],
    "checkpoint_policy": ["latest"],
    "hyperparameters": [[]],
    "entrypoint": [["python3", 3], {"script": "train.py"}, 3],
    # Unions
    "searcher": [
        {"name": "bayesian", "metric": "loss"},
        ASHA | {"mode": "bold"},
        ASHA | {"max_trials": 0},
        SINGLE | {"max_trials": 4},
    ],
    "min_validation_period": [{}, {"steps": 1}, {"batches": 1, "epochs": 1}, {"batches": -1}],
    # Hyperparameters, and properties that are compared
    "hyperparameters.deepspeed_config": [INLINE],
    H: [
        {"type": "int", "minval": 1},
        {"type": "int", "minval": 1, "maxval": 2, "count": 0},
        {"type": "int", "minval": "9", "maxval": 1},
        *({"type": "categorical"}, {"type": "const"}, {"type": "const", "val": 1, "vals": [1]}),
        *({"type": kind, "minval": 2, "maxval": most} for kind in ("int", "double") for most in (1, 2)),
        *({"type": "log", "base": 10, "minval": 2, "maxval": most} for most in (1, 2)),
    ],
    "profiling": [{"begin_on_batch": 6, "end_after_batch": 5}],
    STORED_AT: ["..", "../runs", "a/../../b", "/runs", "/ckpt/a/../../runs"],
    # Checks, and properties that are not allowed
    "bind_mounts": [[MOUNT | {"host_path": "data"}]],
    "resources.shm_size": ["giga", "1.gb", "1 gi", "8g\n"],
    "log_policies": [[{"pattern": "p"}]],
    STORED: [{"type": "hdfs"}, {"type": "s3", "bucket": "b", "prefix": "a/../b"}, {"bucket_name": "b"}],
}

# Refused once the defaults are in, of which the schemas say nothing.
LATE: dict[str, list[Json]] = {
    "": [searched(1), {key: GOOD[key] for key in ("entrypoint", STORED)}],
    "searcher": [
        *({"name": "single"}, {"name": "single", "metric": None}, ASHA | {"max_trials": None}),
        {"name": "custom", "metric": "loss"},
    ],
    "searcher.max_time": [None],
    "entrypoint": [None],
    "resources.slots": [2],
    "resources.shm_size": ["1", "8g", "1.5 gb", "128MiB"],
    "reproducibility.experiment_seed": [2**32],
}
ROWS = [
    (refused, path, values)
    for refused, rows in ((False, ACCEPTED), (True, REFUSED), (True, LATE))
    for path, values in rows.items()
]
# What is damaged: what a master accepts, without what only Kubernetes or the cluster's own storage decides.
WHOLE = [with_value(path, value) if path else value for path, values in ACCEPTED.items() for value in values]
SOUND = [{**each, "environment": {"image": "one"}, STORED: STORAGE} for each in WHOLE]
# Of these, damaged once to three times, by number: 1 for refused.
DAMAGED = (
    "1011111111011010111110111101100110011111111111111111111111010111100110111110111110111111111111111110"
    "1111011101111111111101111101111010101111101101111101111101111011101111111101101111110111111101110111"
    "1001011011001101110001011011111011111111110011011111001011111011111011111011110011011101111111011011"
    "0110110111011111110111111111111110111111110100010010110111111111111111111111111010110110111110111110"
)


def is_refused(config: dict[str, Json]) -> bool:
    """Our verdict; each problem says what is wrong, where, and how to fix it."""
    errors, warnings = schema_problems(config)
    keys = {"", *(".".join(map(str, path)) for path in paths_in(config))}
    for problem in (*errors, *warnings):
        assert problem.message
        assert problem.fix
        assert problem.origin == "const.yaml"
        assert {problem.key, problem.key.rpartition(".")[0]} & keys, problem
    return bool(errors)


@pytest.mark.parametrize(("refused", "path", "values"), ROWS)
def test_each_value_gets_the_masters_verdict(refused: bool, path: str, values: list[Json]) -> None:
    """It is all that differs from a configuration that is accepted."""
    for value in values:
        assert is_refused(with_value(path, value) if path else value) == refused, value


def test_so_do_damaged_configurations() -> None:
    """But for a project without its workspace, or the reverse, which only the master's code refuses."""
    configs = [damaged_by(number) for number in range(len(DAMAGED))]
    halves = [bool(each.get("project")) != bool(each.get("workspace")) for each in configs]
    found = (is_refused(each) or half for each, half in zip(configs, halves, strict=True))
    assert "".join(str(int(refused)) for refused in found) == DAMAGED


def damaged_by(number: int) -> dict[str, Json]:
    choices, config = random.Random(number), SOUND[number % len(SOUND)]
    for _ in range(1 + number % 3):
        config = damaged(config, choices)
    return config
