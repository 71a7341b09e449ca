"""What is ignored is named, with its place and what to write; what cannot be honoured is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from determined_ds.cluster_log import LOG_POLICIES
from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.keys import (
    CLUSTER,
    MEASURE,
    RUN,
    SEARCH,
    ignored_by_ddp,
    ignored_keys,
    json_problems,
)
from determined_ds.config.keys.fate import REFUSED, Fate
from determined_ds.config.keys.of_json import DEEPSPEED
from determined_ds.config.reconcile import reconcile
from determined_ds.documents.document import Document, dotted
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError

HERE = (RUN, SEARCH, MEASURE)
CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)


def told(text: str, place: int) -> dict[str, str]:
    """Key -> message and fix, of the warnings of an experiment."""
    return {
        each.key: f"{each.message}; {each.fix}" for each in ignored_keys(parse_yaml(text, "mine.yaml"), place)
    }


# ------------------------------------------------------------------------------------------- the experiment

ON_A_CLUSTER = """
resources: {slots_per_trial: 2, resource_pool: a100, shm_size: 4096}
environment:
  image: an/image
  environment_variables: [A=1]
bind_mounts: [{host_path: /data, container_path: data}]
checkpoint_storage: {type: s3, bucket: mine}
"""


@pytest.mark.parametrize("place", HERE)
def test_what_is_only_for_a_cluster_is_one_warning_with_every_place(place: int) -> None:
    [warning] = ignored_keys(parse_yaml(ON_A_CLUSTER, "mine.yaml"), place)
    assert str(warning) == (
        "applies only on a cluster; ignored here: resources.resource_pool (mine.yaml:2), "
        "resources.shm_size (mine.yaml:2), environment.image (mine.yaml:4), bind_mounts (mine.yaml:6), "
        "checkpoint_storage.type (mine.yaml:7), checkpoint_storage.bucket (mine.yaml:7)"
    )


def test_on_a_cluster_it_is_no_warning() -> None:
    assert ignored_keys(parse_yaml(ON_A_CLUSTER, "mine.yaml"), CLUSTER) == []


@pytest.mark.parametrize("place", [*HERE, CLUSTER])
@pytest.mark.parametrize(
    ("text", "key", "fit"),
    [
        ("searcher: {name: single, max_length: {batches: 10}}", "searcher.max_length", "max_length"),
        ("min_validation_period: {batches: 10}", "min_validation_period", "validation_period"),
        ("min_checkpoint_period: {epochs: 1}", "min_checkpoint_period", "checkpoint_period"),
        ("perform_initial_validation: true", "perform_initial_validation", "step_zero_validation"),
        ("checkpoint_policy: all", "checkpoint_policy", "checkpoint_policy"),
        ("scheduling_unit: 10", "scheduling_unit", "reporting_period"),
        ("records_per_epoch: 1000", "records_per_epoch", "fit's lengths in epochs"),
        (
            "optimizations: {aggregation_frequency: 4}",
            "optimizations.aggregation_frequency",
            "DeepSpeed JSON",
        ),
        ("optimizations: {mixed_precision: O1}", "optimizations.mixed_precision", "DeepSpeed JSON"),
        ("profiling: {enabled: true, begin_on_batch: 5}", "profiling.begin_on_batch", "remove it"),
    ],
)
def test_what_no_trial_of_a_script_reads_says_what_to_write(
    place: int, text: str, key: str, fit: str
) -> None:
    found = told(text, place)
    assert fit in found[key]
    assert "is ignored" in found[key]


@pytest.mark.parametrize("place", [*HERE, CLUSTER])
@pytest.mark.parametrize(
    "text",
    [
        "name: a\ndescription: b\nlabels: [c]\nworkspace: d\nproject: e",
        "checkpoint_policy: best\nscheduling_unit: 100\nrecords_per_epoch: 0\nperform_initial_validation: false",
        "min_validation_period: {batches: 0}\noptimizations: {}\nsecurity: null",
        "optimizations: {mixed_precision: O0, aggregation_frequency: 1}",
        "profiling: {enabled: false, begin_on_batch: 5}",
        "resources: {native_parallel: false}",
        "searcher: {name: adaptive_asha, metric: loss, max_trials: 3, stop_once: true}",
        "debug: true\nmax_restarts: 2\nreproducibility: {experiment_seed: 3}\ndata: {url: here}",
        "hyperparameters: {global_batch_size: 4, fit: {max_length: {batches: 3}}, anything: {at: {all: 1}}}",
        f"log_policies: {json.dumps(LOG_POLICIES)}",
    ],
    ids=range(10),
)
def test_names_and_what_says_the_default_are_no_warning(place: int, text: str) -> None:
    assert told(text, place) == {}


def test_a_log_policy_of_the_users_own_is_only_for_a_cluster() -> None:
    text = f"log_policies: {json.dumps([*LOG_POLICIES, {'name': 'mine', 'pattern': 'x'}])}"
    assert "log_policies" in str(ignored_keys(parse_yaml(text, "mine.yaml"), RUN))
    assert told(text, CLUSTER) == {}


def test_a_measurement_ignores_more_than_a_run() -> None:
    text = "profiling: {enabled: true}\nsearcher: {name: single, source_checkpoint_uuid: abc}"
    assert told(text, RUN) == {}
    assert told(text, MEASURE).keys() == {"profiling.enabled", "searcher.source_checkpoint_uuid"}


def test_which_checkpoints_are_kept_is_honoured_and_where_they_are_stored_is_not() -> None:
    text = "checkpoint_storage: {type: s3, bucket: mine, save_trial_best: 2, save_trial_latest: 0}"
    for place in (RUN, SEARCH, MEASURE):
        [warning] = ignored_keys(parse_yaml(text, "mine.yaml"), place)
        assert "save_" not in str(warning), place
        assert "checkpoint_storage.bucket" in str(warning), place


def test_a_search_shares_max_slots_and_a_run_does_not() -> None:
    text = "resources: {max_slots: 4}"
    assert told(text, SEARCH) == {}
    assert "resources.max_slots" in str(ignored_keys(parse_yaml(text, "mine.yaml"), RUN))


# --------------------------------------------------------------------------------------- the DeepSpeed JSON


def ds(data: dict[str, Any]) -> Document:
    return Document(name="ds.json", data=data)


def reconciled(
    data: dict[str, Any], *, slots: int = 2, devices: Accelerator = CPU, **hyperparameters: Any
) -> Any:
    given = {"global_batch_size": 8, **hyperparameters}
    return reconcile(Document(name="mine.yaml", data=given), ds(data), slots=slots, accelerator=devices)


def nested(row: Fate) -> dict[str, Any]:
    """A JSON in which the row's key asks for something, and is not switched off."""
    path = row.key.split(".")
    value: Any = not row.default if isinstance(row.default, bool) else "other" if row.default else True
    node = known_keys()
    for step in path:
        node = node["keys"][step]
    if "boolean" not in node["types"] and "string" not in node["types"]:
        value = 3 if "integer" in node["types"] else {"enabled": True}
    for depth in range(len(path) - 1, -1, -1):
        value = {path[depth]: value}
        above = known_keys()
        for step in path[:depth]:
            above = above["keys"][step]
        if depth and "enabled" in above["keys"]:
            value.setdefault("enabled", True)
    return dict(value)


REFUSED_ROWS = [row for row in DEEPSPEED.values() if REFUSED in row.at]


@pytest.mark.parametrize("row", REFUSED_ROWS, ids=lambda row: row.key)
def test_what_cannot_be_honoured_is_refused_with_what_to_do(row: Fate) -> None:
    with pytest.raises(ConfigError) as raised:
        reconciled(nested(row))
    [problem] = raised.value.problems
    assert problem.key == row.key
    if problem.code == "refused-key":  # else it is a name from other documents, and has been refused as such
        assert (problem.message, problem.fix) == (row.why, row.fix)


@pytest.mark.parametrize("row", REFUSED_ROWS, ids=lambda row: row.key)
def test_what_says_the_default_is_not_refused(row: Fate) -> None:
    off = False if row.default is None else row.default
    path = row.key.split(".")
    data: Any = off
    for step in reversed(path):
        data = {step: data}
    assert json_problems(ds(data)) == ([], [])


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"vocabulary_size": 50257}, "vocabulary_size"),
        ({"disable_allgather": True}, "disable_allgather"),
        (
            {"zero_optimization": {"stage": 1, "allgather_partitions": False}},
            "zero_optimization.allgather_partitions",
        ),
        ({"weight_quantization": {"enabled": True, "num_bits": 4}}, "weight_quantization"),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 3}}},
            "data_efficiency.data_sampling",
        ),
    ],
)
def test_what_nobody_looks_at_is_a_warning_of_what_will_run(data: dict[str, Any], key: str) -> None:
    found = {each.key: each for each in reconciled(data).warnings}
    assert any(each == key or each.startswith(f"{key}.") for each in found), found
    assert all(each.code == "ignored-key" and each.fix for each in found.values())


@pytest.mark.parametrize(
    "data",
    [
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
        {"autotuning": {"enabled": False, "fast": True}},
        {"zero_optimization": {"stage": 2, "allgather_partitions": True, "overlap_comm": True}},
        {"wall_clock_breakdown": True, "steps_per_print": 10, "flops_profiler": {"enabled": True}},
        {"dataloader_drop_last": False, "comms_logger": {"enabled": False, "verbose": True}},
    ],
    ids=range(5),
)
def test_what_is_honoured_or_switched_off_is_no_warning(data: dict[str, Any]) -> None:
    assert reconciled(data).warnings == ()


def test_warnings_stand_beside_errors() -> None:
    with pytest.raises(ConfigError) as raised:
        reconciled({"dataloader_drop_last": True, "zero_optimization": {"stage": 2}}, pipe_parallel_size=2)
    assert [each.code for each in raised.value.problems] == ["pipeline-zero-stage"]
    assert "dataloader_drop_last" in [each.key for each in raised.value.warnings]


def test_a_comms_logger_that_is_not_enabled_is_left_out() -> None:
    """DeepSpeed looks only for the section."""
    assert "comms_logger" not in reconciled({"comms_logger": {"enabled": False, "verbose": True}}).ds_config
    assert reconciled({"comms_logger": {"enabled": True}}).ds_config["comms_logger"] == {"enabled": True}


def test_monitors_write_into_the_runs_folder_unless_to_an_absolute_path() -> None:
    data = {
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
        "flops_profiler": {"enabled": True, "output_file": "/data/flops.txt"},
        "wandb": {"enabled": False},
    }
    found = reconciled(data).writing_in("/runs/1/tensorboard")
    assert found.ds_config["tensorboard"]["output_path"] == "/runs/1/tensorboard/"
    assert found.ds_config["csv_monitor"]["output_path"] == "/runs/1/tensorboard/csv"
    assert found.ds_config["flops_profiler"]["output_file"] == "/data/flops.txt"
    assert found.origins[dotted(("tensorboard", "output_path"))] == "the run's folder"
    assert "tensorboard" not in reconciled({}).writing_in("/runs/1").ds_config


def test_ddp_names_what_deepspeed_heeds_and_torch_alone_does_not() -> None:
    """How DeepSpeed does its work is what ddp is compared with; what it computes and prints is not."""
    data = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_allreduce_op": "sum",
        "wall_clock_breakdown": True,
        "gradient_clipping": 1.0,
    }
    [warning] = ignored_by_ddp(ds(data))
    assert warning.message.startswith(
        "the strategy ddp is torch's alone; ignored in its rows: bf16.bf16_master"
    )
    named = [word for word in data if f"{word} (" in warning.message]
    assert named == ["data_types", "gradient_allreduce_op", "wall_clock_breakdown"]
    assert ignored_by_ddp(ds({"zero_optimization": {"stage": 3}})) == []
