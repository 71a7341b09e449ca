"""What the stand-in for the master's schemas accepts and refuses, one extension at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.experiments.master_schemas import (
    BASE_URL,
    IMAGES,
    SCHEMAS,
    completeness_errors,
    create_errors,
    errors,
    fill_defaults,
    sanity_errors,
)

Json = Any

LAUNCH = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train"
STORAGE = {"type": "shared_fs", "host_path": "/ckpt"}
SINGLE = {"name": "single", "metric": "loss"}
ASHA = {"name": "adaptive_asha", "metric": "loss", "max_trials": 8, "max_time": 100, "time_metric": "batches"}
GRID = {"name": "grid", "metric": "loss"}
RANGE = {"type": "int", "minval": 1, "maxval": 4}

GOOD: dict[str, Json] = {
    "name": "gpt2",
    "description": "a full config",
    "labels": ["deepspeed"],
    "workspace": "lab",
    "project": "gpt2",
    "entrypoint": f"{LAUNCH} model_defs.gpt2.trial:GPT2Trial",
    "bind_mounts": [{"host_path": "/data", "container_path": "/data", "read_only": True}],
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


def with_value(path: str, value: Json) -> dict[str, Json]:
    """The good config with one value, at a dotted path, set to another."""
    config = copy.deepcopy(GOOD)
    *parents, key = path.split(".")
    part = config
    for parent in parents:
        part = part.setdefault(parent, {})
    part[key] = value
    return config


def without(*keys: str) -> dict[str, Json]:
    """The good config less some of its fields."""
    return {key: value for key, value in GOOD.items() if key not in keys}


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


ALL_SUBSCHEMAS = [sub for schema in SCHEMAS.values() for sub in subschemas(schema)]


class TestVendoredSchemas:
    def test_every_keyword_is_known(self) -> None:
        known = (
            "additionalProperties allOf anyOf const enum exclusiveMinimum if items maximum minLength minimum "
        )
        known += "not oneOf pattern properties required then type $ref $id title $comment default unionKey "
        known += "union checks compareProperties disallowProperties optionalRef eventuallyRequired eventually"
        assert {keyword for sub in ALL_SUBSCHEMAS for keyword in sub} <= set(known.split())

    def test_every_reference_is_there(self) -> None:
        references = {sub[key] for sub in ALL_SUBSCHEMAS for key in ("$ref", "optionalRef") if key in sub}
        assert references <= set(SCHEMAS)

    def test_reachable_from_the_experiment(self) -> None:
        assert BASE_URL + "experiment.json" in SCHEMAS
        assert len(SCHEMAS) > 50


class TestWholeConfig:
    def test_good_config_passes(self) -> None:
        assert errors(GOOD) == []
        assert create_errors(GOOD) == []

    def test_argument_is_left_alone(self) -> None:
        before = copy.deepcopy(GOOD)
        errors(GOOD, checkpoint_storage=STORAGE)
        assert before == GOOD

    def test_all_errors_are_listed_with_their_paths(self) -> None:
        config = with_value("resources.slots_per_trial", "two") | {"epochs": 3}
        found = errors(config)
        assert "<config>.resources.slots_per_trial: 'two' is not of type 'integer', 'null'" in found
        assert any(error.startswith("<config>: ") and "'epochs' was unexpected" in error for error in found)

    def test_paths_go_through_lists(self) -> None:
        [error] = sanity_errors(with_value("labels", ["a", 1]))
        assert error.startswith("<config>.labels[1]: ")

    @pytest.mark.parametrize("config", [None, [], "text", 3])
    def test_config_must_be_a_mapping(self, config: Json) -> None:
        assert sanity_errors(config)
        assert completeness_errors(config)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
    def test_config_must_be_json(self, value: Json) -> None:
        config = with_value("hyperparameters.learning_rate", value)
        assert "cannot be sent as JSON" in sanity_errors(config)[0]
        assert "cannot be sent as JSON" in completeness_errors(config)[0]

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("version", 0),
            ("searchr", {}),
            ("resources.gpus", 2),
            ("max_restarts", -1),
            ("max_restarts", True),
            ("max_restarts", "3"),
            ("scheduling_unit", 0),
            ("checkpoint_policy", "latest"),
            ("resources.priority", 100),
            ("hyperparameters", []),
            ("environment.ports", {"web": "80"}),
        ],
    )
    def test_plain_json_schema_refusals(self, path: str, value: Json) -> None:
        assert sanity_errors(with_value(path, value))

    @pytest.mark.parametrize("entrypoint", ["python3 train.py", ["python3", "train.py"], None])
    def test_entrypoint_is_a_string_or_a_list_of_strings(self, entrypoint: Json) -> None:
        assert errors(with_value("entrypoint", entrypoint)) == []

    @pytest.mark.parametrize("entrypoint", [["python3", 3], {"script": "train.py"}, 3])
    def test_entrypoint_of_anything_else_is_refused(self, entrypoint: Json) -> None:
        assert sanity_errors(with_value("entrypoint", entrypoint))

    def test_whole_float_is_an_integer(self) -> None:
        assert sanity_errors(with_value("max_restarts", 2.0)) == []


class TestUnion:
    def test_unknown_searcher_gets_the_default_message(self) -> None:
        [error] = sanity_errors(with_value("searcher", {"name": "bayesian", "metric": "loss"}))
        assert error.startswith(
            "<config>.searcher: is not an object where object[\"name\"] is one of 'single'"
        )

    def test_union_key_picks_the_errors(self) -> None:
        found = sanity_errors(with_value("searcher", ASHA | {"mode": "bold", "max_trials": 0}))
        assert [error.split(": ")[0] for error in found] == [
            "<config>.searcher.max_trials",
            "<config>.searcher.mode",
        ]

    def test_field_of_another_searcher_is_refused(self) -> None:
        [error] = sanity_errors(with_value("searcher", SINGLE | {"max_trials": 4}))
        assert "'max_trials' was unexpected" in error

    @pytest.mark.parametrize("length", [{"batches": 1}, {"records": 1}, {"epochs": 1}, {"batches": 0}])
    def test_length(self, length: Json) -> None:
        assert sanity_errors(length, schema="length.json") == []

    @pytest.mark.parametrize("length", [{}, {"steps": 1}, {"batches": 1, "epochs": 1}, 100])
    def test_no_length(self, length: Json) -> None:
        [error] = sanity_errors(length, schema="length.json")
        assert 'one attribute named "batches", "records", or "epochs"' in error

    def test_negative_length_names_its_unit(self) -> None:
        [error] = sanity_errors({"batches": -1}, schema="length.json")
        assert error.startswith("<config>.batches: ")

    @pytest.mark.parametrize("image", ["one", {"cpu": "a"}, {"gpu": "old"}, None])
    def test_image(self, image: Json) -> None:
        assert errors(with_value("environment.image", image)) == []

    def test_no_image(self) -> None:
        [error] = sanity_errors(with_value("environment.image", {"tpu": "a"}))
        assert (
            error
            == "<config>.environment.image: is neither a string nor a map of cpu, cuda, or rocm to strings"
        )


class TestHyperparameters:
    @pytest.mark.parametrize(
        "hyperparameter",
        [
            None,
            3,
            "text",
            [1, {"any": "thing"}],
            {"nested": {"deep": {"type": "int", "minval": 1, "maxval": 2}}},
            {"type": "const", "val": None},
            {"type": "const", "val": {"optimizer": {"type": "AdamW"}}},
            {"type": "categorical", "vals": [{"optimizer": {"type": "AdamW"}}, 1]},
            {"type": "double", "minval": 0.0, "maxval": 0.5, "count": None},
        ],
    )
    def test_accepted(self, hyperparameter: Json) -> None:
        assert errors(with_value("hyperparameters.h", hyperparameter)) == []

    def test_inline_deepspeed_optimizer_is_taken_for_a_hyperparameter(self) -> None:
        inline = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
        [error] = sanity_errors(with_value("hyperparameters.deepspeed_config", inline))
        assert error.startswith("<config>.hyperparameters.deepspeed_config.optimizer: ")
        assert 'it must be one of "int", "double", "log"' in error
        assert errors(with_value("hyperparameters.deepspeed_config", {"type": "const", "val": inline})) == []

    def test_a_list_hides_a_type_key(self) -> None:
        assert errors(with_value("hyperparameters.h", [{"type": "AdamW"}])) == []

    @pytest.mark.parametrize(
        "hyperparameter",
        [
            {"type": "int", "minval": 1},
            {"type": "int", "minval": 1, "maxval": 2.5},
            {"type": "log", "minval": 1, "maxval": 2, "base": 0},
            {"type": "categorical"},
            {"type": "const"},
            {"type": "const", "val": 1, "vals": [1]},
            {"type": "int", "minval": 1, "maxval": 2, "count": 0},
        ],
    )
    def test_refused(self, hyperparameter: Json) -> None:
        assert sanity_errors(with_value("hyperparameters.h", hyperparameter))

    def test_empty_categorical_passes(self) -> None:
        """The schema says ``minLength``, which is for strings."""
        assert sanity_errors(with_value("hyperparameters.h", {"type": "categorical", "vals": []})) == []


class TestGrid:
    @pytest.mark.parametrize("hyperparameter", [RANGE, {"nested": RANGE}, [RANGE], RANGE | {"count": None}])
    def test_range_without_count_is_refused(self, hyperparameter: Json) -> None:
        config = {"searcher": GRID, "hyperparameters": {"h": hyperparameter}}
        [error] = sanity_errors(config)
        assert error.endswith(": grid search is in use but count was not provided")
        assert error.startswith("<config>.hyperparameters.h")

    def test_range_with_count_passes(self) -> None:
        assert sanity_errors({"searcher": GRID, "hyperparameters": {"h": RANGE | {"count": 2}}}) == []

    def test_other_searchers_need_no_count(self) -> None:
        assert sanity_errors({"searcher": ASHA, "hyperparameters": {"h": RANGE}}) == []

    @pytest.mark.parametrize("config", [{}, {"searcher": None}, {"searcher": {"metric": "loss"}}])
    def test_a_searcher_not_named_counts_as_grid(self, config: Json) -> None:
        """The schema's ``if`` asks only about a name that is there."""
        [error] = sanity_errors(config | {"hyperparameters": {"h": RANGE}})
        assert "grid search is in use" in error


class TestCompareProperties:
    @pytest.mark.parametrize("kind", ["int", "double", "log"])
    @pytest.mark.parametrize("maxval", [1, 2])
    def test_minval_must_be_less(self, kind: str, maxval: int) -> None:
        hyperparameter = {"type": kind, "minval": 2, "maxval": maxval} | (
            {"base": 10} if kind == "log" else {}
        )
        [error] = sanity_errors(with_value("hyperparameters.h", hyperparameter))
        assert error == "<config>.hyperparameters.h: minval must be less than maxval"

    def test_wrong_types_are_not_compared(self) -> None:
        [error] = sanity_errors({"type": "int", "minval": "9", "maxval": 1}, schema="hyperparameter-int.json")
        assert error.startswith("<config>.minval: ")

    def test_profiling_may_begin_where_it_ends(self) -> None:
        assert sanity_errors({"begin_on_batch": 5, "end_after_batch": 5}, schema="profiling.json") == []
        assert sanity_errors({"begin_on_batch": 6, "end_after_batch": 5}, schema="profiling.json")
        assert sanity_errors({"begin_on_batch": 6}, schema="profiling.json") == []

    @pytest.mark.parametrize(
        "storage_path", [None, "runs", "/ckpt/runs", "/ckpt", "//ckpt/runs", "a/../b", "/ckptfile"]
    )
    def test_storage_path_within(self, storage_path: str | None) -> None:
        """``/ckptfile`` too: the master compares the strings."""
        assert sanity_errors(STORAGE | {"storage_path": storage_path}, schema="shared-fs.json") == []

    @pytest.mark.parametrize("storage_path", ["..", "../runs", "a/../../b", "/runs", "/ckpt/a/../../runs"])
    def test_storage_path_outside(self, storage_path: str) -> None:
        [error] = sanity_errors(STORAGE | {"storage_path": storage_path}, schema="shared-fs.json")
        assert "must either be a relative directory or a subdirectory of host_path" in error


class TestChecks:
    def test_messages_stand_for_the_failures(self) -> None:
        found = sanity_errors({"host_path": "data", "container_path": "."}, schema="bind-mount.json")
        assert found == [
            '<config>.container_path: container_path must not be "."',
            "<config>.host_path: host_path must be an absolute path",
        ]

    @pytest.mark.parametrize("shm_size", [1, "1", "1.5 gb", "128MiB", None])
    def test_shm_size(self, shm_size: Json) -> None:
        assert sanity_errors({"shm_size": shm_size}, schema="resources.json") == []

    @pytest.mark.parametrize("shm_size", ["giga", "1.gb", "1 gi", "8g\n"])
    def test_no_shm_size(self, shm_size: str) -> None:
        found = sanity_errors({"shm_size": shm_size}, schema="resources.json")
        assert found == ["<config>.shm_size: must be a valid memory size"]

    @pytest.mark.parametrize("policy", [{"name": "n"}, {"pattern": "p", "action": {"type": "exclude_node"}}])
    def test_log_policy(self, policy: Json) -> None:
        assert errors(with_value("log_policies", [policy])) == []

    def test_no_log_policy(self) -> None:
        assert '"name" must be set' in sanity_errors(with_value("log_policies", [{"pattern": "p"}]))[0]


class TestDisallowProperties:
    def test_pod_spec(self) -> None:
        [error] = sanity_errors(with_value("environment.pod_spec", {"name": None}))
        assert error == "<config>.environment.pod_spec: pod Name is not a configurable option"

    def test_container_of_determined(self) -> None:
        containers = [{"name": "sidecar", "image": "a"}, {"name": "determined-container", "image": "a"}]
        [error] = sanity_errors(with_value("environment.pod_spec", {"spec": {"containers": containers}}))
        assert error.startswith("<config>.environment.pod_spec.spec.containers[1]: container Image is not")


class TestOptionalRef:
    def test_null_and_the_referred_to(self) -> None:
        assert sanity_errors({"kerberos": None}, schema="security.json") == []
        assert sanity_errors({"kerberos": {"config_file": "f"}}, schema="security.json") == []

    def test_errors_are_those_of_the_referred_to(self) -> None:
        [error] = sanity_errors({"kerberos": {"config_file": 1}}, schema="security.json")
        assert error.startswith("<config>.kerberos.config_file: ")


class TestEventually:
    """Fine at submission, for the cluster may fill it in; refused where nothing has."""

    @pytest.mark.parametrize("key", ["checkpoint_storage", "searcher"])
    def test_fields_without_a_default(self, key: str) -> None:
        config = without(key, "hyperparameters")
        assert sanity_errors(config) == []
        assert completeness_errors(config) == [f"<config>: {key} is a required property"]

    @pytest.mark.parametrize("key", ["name", "hyperparameters", "reproducibility", "environment"])
    def test_fields_with_a_default(self, key: str) -> None:
        assert errors(without(key)) == []

    @pytest.mark.parametrize("searcher", [{"name": "single"}, {"name": "single", "metric": None}])
    def test_searcher_needs_a_metric(self, searcher: Json) -> None:
        config = with_value("searcher", searcher)
        assert sanity_errors(config) == []
        assert completeness_errors(config) == ["<config>.searcher: metric is a required property"]

    def test_searcher_needs_a_name(self) -> None:
        config = with_value("searcher", {"metric": "loss"}) | {"hyperparameters": {}}
        assert sanity_errors(config) == []
        assert completeness_errors(config) == ["<config>.searcher: name is a required property"]

    def test_adaptive_asha_needs_max_trials(self) -> None:
        config = with_value("searcher", ASHA | {"max_trials": None})
        assert sanity_errors(config) == []
        assert completeness_errors(config) == ["<config>.searcher: max_trials is a required property"]

    def test_subschema(self) -> None:
        azure = {"type": "azure", "container": "c"}
        assert sanity_errors(azure, schema="azure.json") == []
        [error] = completeness_errors(azure, schema="azure.json")
        assert error == "<config>: Exactly one of connection_string or account_url must be set"
        assert completeness_errors(azure | {"account_url": "u"}, schema="azure.json") == []


class TestCheckpointStorage:
    @pytest.mark.parametrize(
        "storage",
        [
            {"type": "shared_fs", "host_path": "/ckpt"},
            {"type": "directory", "container_path": "/tmp"},
            {"type": "s3", "bucket": "b", "prefix": "a/./b"},
            {"type": "gcs", "bucket": "b", "prefix": None},
            {"type": "azure", "container": "c", "connection_string": "s"},
        ],
    )
    def test_each_type(self, storage: Json) -> None:
        assert errors(with_value("checkpoint_storage", storage)) == []

    @pytest.mark.parametrize(
        "storage",
        [
            {"type": "hdfs"},
            {"type": "s3", "bucket": "b", "prefix": "a/../b"},
            {"type": "gcs", "bucket": "b", "prefix": ".."},
            {"type": "gcs", "bucket": "b", "host_path": "/ckpt"},
            {"type": "azure", "connection_string": "s", "credential": "c"},
            {"type": "shared_fs", "host_path": "/ckpt", "save_trial_best": -1},
            {"bucket_name": "b"},
        ],
    )
    def test_refused_at_once(self, storage: Json) -> None:
        assert sanity_errors(with_value("checkpoint_storage", storage))

    @pytest.mark.parametrize("storage", [{}, {"type": "shared_fs"}, {"type": "s3"}, {"save_trial_best": 2}])
    def test_refused_if_it_stays_so(self, storage: Json) -> None:
        config = with_value("checkpoint_storage", storage)
        assert sanity_errors(config) == []
        assert completeness_errors(config)

    @pytest.mark.parametrize("given", [None, {}, {"save_trial_best": 2}, {"type": "shared_fs"}])
    def test_the_cluster_s_own_completes_it(self, given: Json) -> None:
        assert errors(with_value("checkpoint_storage", given), checkpoint_storage=STORAGE) == []

    def test_the_cluster_s_own_of_another_type(self) -> None:
        given = {"type": "gcs", "bucket": "b", "save_trial_best": 3}
        cluster = STORAGE | {"save_trial_best": 9, "save_experiment_best": 9}
        filled = fill_defaults({"checkpoint_storage": given}, checkpoint_storage=cluster)[
            "checkpoint_storage"
        ]
        assert filled == given | {"save_experiment_best": 9, "save_trial_latest": 1}


class TestDefaults:
    def test_of_the_schemas_all_the_way_down(self) -> None:
        filled = fill_defaults({"searcher": SINGLE, "resources": {"slots_per_trial": None}})
        assert filled["max_restarts"] == 5
        assert filled["min_validation_period"] == {"batches": 0}
        assert filled["resources"]["slots_per_trial"] == 1
        assert filled["optimizations"]["aggregation_frequency"] == 1
        assert filled["searcher"] == SINGLE | {"smaller_is_better": True}

    def test_of_a_union_s_chosen_item(self) -> None:
        searcher = fill_defaults({"searcher": ASHA})["searcher"]
        assert searcher["mode"] == "standard"
        assert searcher["max_concurrent_trials"] == 16
        assert searcher["max_trials"] == 8

    def test_in_lists(self) -> None:
        config = {
            "bind_mounts": [{"host_path": "/a", "container_path": "/b"}],
            "resources": {"devices": ["/a:/b", "/c:/d:r"]},
        }
        filled = fill_defaults(config)
        assert filled["bind_mounts"][0]["propagation"] == "rprivate"
        assert [device["mode"] for device in filled["resources"]["devices"]] == ["mrw", "r"]

    def test_that_the_master_makes_up(self) -> None:
        filled = fill_defaults({})
        assert filled["name"]
        assert filled["reproducibility"]["experiment_seed"] is not None
        assert filled["environment"]["image"] == IMAGES
        assert filled["environment"]["environment_variables"] == {"cpu": [], "cuda": [], "rocm": []}
        assert [policy["name"] for policy in filled["log_policies"]] == ["CUDA OOM", "ECC Error"]

    def test_short_forms(self) -> None:
        environment = {"image": {"gpu": "mine"}, "environment_variables": ["A=1"]}
        filled = fill_defaults({"environment": environment})["environment"]
        assert filled["image"] == IMAGES | {"cuda": "mine"}
        assert filled["environment_variables"] == {"cpu": ["A=1"], "cuda": ["A=1"], "rocm": ["A=1"]}

    def test_hyperparameter_values_are_left_alone(self) -> None:
        hyperparameters = {"h": {"type": "const", "val": {"a": None}}, "i": None, "j": [None]}
        assert fill_defaults({"hyperparameters": hyperparameters})["hyperparameters"] == hyperparameters

    def test_filling_twice_changes_nothing(self) -> None:
        once = fill_defaults(GOOD)
        assert fill_defaults(once) == once
        assert sanity_errors(once) == []


class TestCreate:
    """Refused by the master's code; its schemas say nothing."""

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            ("entrypoint", None, "require entrypoint"),
            ("project", "", "workspace and project must both"),
            ("resources.slots", 2, '"slots" not allowed'),
            ("resources.shm_size", "8g", "number of bytes"),
            ("reproducibility.experiment_seed", 2**32, "uint32"),
            ("searcher.max_time", None, "requires `max_time` and `time_metric`"),
            ("searcher", {"name": "custom", "metric": "loss"}, "has been removed"),
            ("log_policies", [{"name": "n"}, {"name": "n", "pattern": "p"}], "duplicated names"),
        ],
    )
    def test_refused_beside_the_schemas(self, path: str, value: Json, said: str) -> None:
        config = with_value(path, value)
        assert errors(config) == []
        [error] = create_errors(config)
        assert said in error

    def test_insane_config(self) -> None:
        assert create_errors({"searcher": 3}) == sanity_errors({"searcher": 3})
