"""Experiment configs made from the master's own schemas: mostly valid, and then made nearly so."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.harness.master_schemas import BASE_URL, SCHEMAS

Json = Any
Path = tuple[Any, ...]

TEXTS = ["a", "loss", "a/b", "1", "A=1", "/data", ""]
SEARCHERS = ["single", "random", "grid", "adaptive_asha", "async_halving"]
ANYTHING = [None, 0, 1, -3, 2.5, True, "text", "", [], [1], {}, {"a": 1}, {"a": {"b": [{"c": None}]}}]

SCALARS = ["integer", "number", "string", "boolean", "array", "null"]

# Where a schema's checks go beyond what types, bounds and unions say: values that pass. By the schema's title.
PASSING: dict[tuple[str, str], list[Json]] = {
    ("BindMount", "host_path"): ["/data", "/"],
    ("BindMount", "container_path"): ["/data", "data", ""],
    ("ResourcesConfig", "shm_size"): [None, 2**32, 1.0],
    ("ResourcesConfig", "slots"): [None],
    ("SharedFSConfig", "host_path"): ["/data", "/"],
    ("SharedFSConfig", "storage_path"): [None, "a", "a/../b", "/data/x", "/datax", "//data/x", "./..a"],
    ("S3Config", "prefix"): [None, "a/b", "..a", "a..", ""],
    ("GCSConfig", "prefix"): [None, "a/./b", "/a..b/"],
    ("AzureConfig", "connection_string"): [None],
    ("IntHyperparameter", "minval"): [-3, 1, 1.0],
    ("IntHyperparameter", "maxval"): [2, 4.0],
    ("DoubleHyperparameter", "minval"): [-0.5, 1],
    ("DoubleHyperparameter", "maxval"): [1.5, 20],
    ("LogHyperparameter", "minval"): [-4.5, -1],
    ("LogHyperparameter", "maxval"): [0, 1.5],
    ("LogHyperparameter", "base"): [10, 0.5],
    ("ProfilingConfig", "begin_on_batch"): [None, 0, 5],
    ("ProfilingConfig", "end_after_batch"): [None, 5, 7.0],
    ("ReproducibilityConfig", "experiment_seed"): [None, 0, 7, 2**32 - 1],
    ("ExperimentConfig", "entrypoint"): ["python3 train.py", ["python3", "train.py"], "model_def:Trial"],
    ("EnvironmentConfig", "pod_spec"): [
        None,
        {"kind": "Pod", "spec": None},
        {"spec": {"containers": [{"name": "sidecar", "image": "a"}, {"name": "determined-container"}]}},
        {"spec": {"containers": [{"env": []}], "volumes": []}},
    ],
    ("DevicesConfig", ""): ["/dev/a:/dev/b", "/dev/a:/dev/b:rw", "/a:/"],
}
# What the master's code demands beyond the schemas.
DEMANDED = {"entrypoint", "searcher", "max_time", "time_metric"}


class Maker:
    """Makes configs with the choices of a random number generator."""

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices

    def config(self) -> dict[str, Json]:
        """Valid, or at least close to it."""
        config = self.value(SCHEMAS[BASE_URL + "experiment.json"])
        searcher = config["searcher"]
        if searcher["name"] not in SEARCHERS and self.chance(80):
            config["searcher"] = {"name": "single", "metric": "loss"}
        if self.chance(90):
            for key in ("workspace", "project"):
                config.pop(key, None)
        elif self.chance(50):
            config |= {"workspace": "a", "project": "b"}
        for index, policy in enumerate(config.get("log_policies") or []):
            policy["name"] = f"policy {index}"
        unused = config.get("tensorboard_storage") or {}
        for key in [key for key in unused if key.startswith("save_") and self.chance(90)]:
            del unused[key]
        storage = config.get("checkpoint_storage")
        if storage and self.chance(20):
            storage.pop("type", None)
        if searcher["name"] == "grid" and self.chance(90):
            config["hyperparameters"] = {"a": 1, "b": {"c": {"type": "const", "val": {}}}, "d": [{"e": 1}]}
        return config

    def one_section(self) -> dict[str, Json]:
        """A config with one section of its own, so that each is looked into closely."""
        fields = SCHEMAS[BASE_URL + "experiment.json"]["properties"]
        large = [
            "environment",
            "resources",
            "searcher",
            "hyperparameters",
            "checkpoint_storage",
            "integrations",
        ]
        key = self.choices.choice([*fields, *large, *large])
        config = {
            "entrypoint": "a",
            "searcher": {"name": self.choices.choice(["single", "grid"]), "metric": "a"},
        }
        return config | {key: self.value(fields[key], "ExperimentConfig", key)}

    def value(self, schema: Json, title: str = "", key: str = "") -> Json:
        """An instance of a schema."""
        if (title, key) in PASSING:
            return copy.deepcopy(self.choices.choice(PASSING[title, key]))
        if schema is True:
            return copy.deepcopy(self.choices.choice(ANYTHING))
        if "$ref" in schema:
            return self.value(SCHEMAS[schema["$ref"]])
        if schema.get("title") == "CheckPositiveLength":
            return {self.choices.choice(["batches", "records", "epochs"]): self.choices.choice([1, 50, 2.0])}
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.choices.choice(schema["enum"])
        kinds = schema.get("type", "object")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "null" in kinds and self.chance(15):
            return None
        if "optionalRef" in schema:
            return self.value(SCHEMAS[schema["optionalRef"]])
        union = schema.get("union") or schema.get("then", {}).get("union")
        if union:
            item = self.choices.choice(union["items"])
            return self.value(item if "not" not in item else {"type": SCALARS}, schema.get("title", title))
        return self.of_kind(
            self.choices.choice([kind for kind in kinds if kind != "null"] or ["null"]), schema
        )

    def of_kind(self, kind: str, schema: Json) -> Json:
        if kind == "object":
            return self.fields(schema)
        if kind == "array":
            title = schema.get("title", "")
            items = schema.get("items", True)
            return [self.value(items, title) for _ in range(self.choices.randrange(3))]
        if kind == "string":
            return self.choices.choice(TEXTS) if "pattern" not in schema else "/dev/a:/dev/b"
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            number = self.choices.choice([low, low + 1, min(low + 40, schema.get("maximum", 1e9)), low + 2.0])
            return number + 0.5 if kind == "number" and self.chance(30) else number
        return {"boolean": self.chance(50), "null": None}[kind]

    def fields(self, schema: Json) -> dict[str, Json]:
        title = schema.get("title", "")
        needed = {*schema.get("required", []), *schema.get("eventuallyRequired", []), *DEMANDED}
        some = 12 if title == "ExperimentConfig" else 40
        made = {}
        for key, sub in schema.get("properties", {}).items():
            if key not in needed and not self.chance(some):
                continue
            value = self.value(sub, title, key)
            if key in needed and value is None and isinstance(sub, dict):
                kinds = [kind for kind in sub.get("type", []) if kind != "null"]
                value = self.value(sub | {"type": kinds} if kinds else sub, title)
            made[key] = value
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            for key in ("x", "y", "z")[: self.choices.randrange(4)]:
                made[key] = self.value(others)
        return made

    def chance(self, percent: int) -> bool:
        return self.choices.randrange(100) < percent

    # --- What goes wrong ---

    def damaged(self, config: dict[str, Json]) -> dict[str, Json]:
        """A config with one thing about it changed; that may leave it valid."""
        config = copy.deepcopy(config)
        path = self.choices.choice(list(_paths(config)) or [None])
        if path is None:
            return config
        parent = config
        for step in path[:-1]:
            parent = parent[step]
        key, value = path[-1], parent[path[-1]]
        how = self.choices.choice("drop misspell retype null bound unknown swap nest move".split())  # noqa: SIM905
        if how == "unknown" and isinstance(value, dict):
            value[self.choices.choice(["unknown", "type", "name", "metric", "bucket", "save_trial_best"])] = (
                copy.deepcopy(self.choices.choice(ANYTHING))
            )
        elif how == "swap" and isinstance(value, dict) and {"type", "name"} & value.keys():
            tag = "type" if "type" in value else "name"
            value[tag] = self.choices.choice(KINDS)
        elif how == "misspell" and isinstance(key, str):
            parent[self.choices.choice([key + "s", key[1:], key.upper()])] = parent.pop(key)
        elif how == "move":
            target = self.choices.choice([config, *(v for v in config.values() if isinstance(v, dict))])
            target[str(key)] = copy.deepcopy(value)
        elif how in ("drop", "move"):
            del parent[key]
        elif how == "nest":
            parent[key] = self.choices.choice([[value], {"type": value}, {str(key): value}])
        else:
            parent[key] = self.replacement(how, value)
        return config

    def replacement(self, how: str, value: Json) -> Json:
        if how == "null":
            return None
        if how == "bound" and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.choices.choice([-value, value + 0.5, 0, -1, -2, 1.0, 100, 2**32, 2**15, value * 1.0])
        if how == "bound" and isinstance(value, str):
            return self.choices.choice(
                ["../a", "a/..", "a/../b", "..", ".", "/a:/b\n", "8g\n", value + " ", KINDS[0]]
            )
        return copy.deepcopy(self.choices.choice(ANYTHING))


KINDS = """single random grid adaptive_asha async_halving custom adaptive sync_halving adaptive_simple s3 gcs azure
    shared_fs directory hdfs const categorical int double log cancel_retries exclude_node AdamW""".split()  # noqa: SIM905


def _paths(value: Json, path: Path = ()) -> Any:
    """Every path within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _paths(item, (*path, key))
