"""Experiment configs made from the master's own schemas, mostly valid; and damage to any configuration."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
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
        large = "environment resources searcher hyperparameters checkpoint_storage integrations".split()  # noqa: SIM905
        key = self.choices.choice([*fields, *large, *large])
        searcher = {"name": self.choices.choice(["single", "grid"]), "metric": "a"}
        made = self.value(fields[key], "ExperimentConfig", key)
        return {"entrypoint": "a", "searcher": searcher, key: made}

    def value(self, schema: Json, title: str = "", key: str = "", *, needed: bool = False) -> Json:
        """An instance of a schema, which stands below a key of a mapping; null only where that is not needed."""
        choose = self.choices.choice
        if (title, key) in PASSING:
            return copy.deepcopy(choose(PASSING[title, key]))
        if schema is True:
            return copy.deepcopy(choose(ANYTHING))
        if "$ref" in schema:
            return self.value(SCHEMAS[schema["$ref"]])
        title = schema.get("title", title)
        if title == "CheckPositiveLength":
            return {choose(["batches", "records", "epochs"]): choose([1, 50, 2.0])}
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return choose(schema["enum"])
        kinds = schema.get("type", "object")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "null" in kinds and not needed and self.chance(15):
            return None
        if "optionalRef" in schema:
            return self.value(SCHEMAS[schema["optionalRef"]])
        if union := schema.get("union") or schema.get("then", {}).get("union"):
            item = choose(union["items"])
            return self.value(item if "not" not in item else {"type": SCALARS}, title)
        match choose([kind for kind in kinds if kind != "null"] or ["null"]):
            case "object":
                return self.fields(schema)
            case "array":
                items = schema.get("items", True)
                return [self.value(items, schema.get("title", "")) for _ in range(self.choices.randrange(3))]
            case "string":
                return choose(TEXTS) if "pattern" not in schema else "/dev/a:/dev/b"
            case "boolean":
                return self.chance(50)
            case "integer" | "number" as kind:
                low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
                number = choose([low, low + 1, min(low + 40, schema.get("maximum", 1e9)), low + 2.0])
                return number + 0.5 if kind == "number" and self.chance(30) else number
        return None

    def fields(self, schema: Json) -> dict[str, Json]:
        title = schema.get("title", "")
        needed = {*schema.get("required", []), *schema.get("eventuallyRequired", []), *DEMANDED}
        some = 12 if title == "ExperimentConfig" else 40
        made = {
            key: self.value(sub, title, key, needed=key in needed)
            for key, sub in schema.get("properties", {}).items()
            if key in needed or self.chance(some)
        }
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            made |= {key: self.value(others) for key in "xyz"[: self.choices.randrange(4)]}
        return made

    def chance(self, percent: int) -> bool:
        return self.choices.randrange(100) < percent


# --- What goes wrong ---

KINDS = """single random grid adaptive_asha async_halving custom adaptive sync_halving adaptive_simple s3 gcs azure
    shared_fs directory hdfs const categorical int double log cancel_retries exclude_node AdamW""".split()  # noqa: SIM905
NEW_KEYS = ["unknown", "type", "name", "metric", "bucket", "save_trial_best"]
ODD_TEXTS = ["../a", "a/..", "a/../b", "..", ".", "/a:/b\n", "8g\n", "single"]
DAMAGES = ["drop", "misspell", "move", "null", "replace", "bound", "wrap", "add", "swap"]


def paths_in(data: Json, path: Path = ()) -> Iterator[Path]:
    """The path of every value below the top."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


def damaged(config: dict[str, Json], choices: random.Random) -> dict[str, Json]:
    """A copy with one thing about it changed; that may leave it valid."""
    config = copy.deepcopy(config)
    paths = [*paths_in(config)]
    if not paths:
        return config
    *above, key = choices.choice(paths)
    parent: Json = config
    for step in above:
        parent = parent[step]
    how, value, word = choices.choice(DAMAGES), parent[key], str(key)
    if how in ("drop", "misspell", "move"):
        del parent[key]
    if how == "misspell" and isinstance(parent, dict):
        at = choices.randrange(len(word) + 1)
        slips = [word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word[1:], word[::-1], word.upper()]
        parent[choices.choice([*slips, f"{word}s"])] = value
    elif how == "move":
        choices.choice([config, *(each for each in config.values() if isinstance(each, dict))])[word] = value
    elif how == "null":
        parent[key] = None
    elif how == "wrap":
        const = {"type": "const", "val": value}
        parent[key] = choices.choice(
            [[value], [value, value], {"type": value}, {word: value}, const, str(value)]
        )
    elif how == "add" and isinstance(value, dict):
        value[choices.choice(NEW_KEYS)] = copy.deepcopy(choices.choice(ANYTHING))
    elif how == "swap" and isinstance(value, dict) and {"type", "name"} & value.keys():
        value["type" if "type" in value else "name"] = choices.choice(KINDS)
    elif how == "bound" and isinstance(value, (int, float)) and not isinstance(value, bool):
        near = [-value, value + 1, value + 0.5, value * 1.0, value * 10**6]
        parent[key] = choices.choice([*near, 0, -1, -2, 1.0, 100, 2**15, 2**32])
    elif how == "bound" and isinstance(value, str):
        parent[key] = choices.choice([*ODD_TEXTS, f"{value} "])
    elif how in ("replace", "bound", "add", "swap"):
        parent[key] = copy.deepcopy(choices.choice(ANYTHING))
    return config
