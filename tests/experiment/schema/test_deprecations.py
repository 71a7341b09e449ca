"""Deprecated keys: a warning with what to write instead, in every row of the table."""

from __future__ import annotations

import pytest

from determined_ds.experiment.schema.deprecations import TABLE
from tests.experiment.schema.test_messages import judged

DEPRECATED = [
    (
        "searcher: {name: single, metric: a, max_length: 5}",
        "searcher.max_length",
        "hyperparameters.fit.max_length",
    ),
    (
        "searcher: {name: async_halving, metric: a, max_trials: 1, num_rungs: 1, max_time: 9, time_metric: b,"
        " stop_once: true}",
        "searcher.stop_once",
        "remove it",
    ),
    ("min_validation_period: {batches: 1}", "min_validation_period", "hyperparameters.fit.validation_period"),
    ("min_checkpoint_period: {epochs: 0}", "min_checkpoint_period", "hyperparameters.fit.checkpoint_period"),
    ("scheduling_unit: 10", "scheduling_unit", "hyperparameters.fit.reporting_period"),
    ("optimizations: {mixed_precision: O1}", "optimizations", "DeepSpeed JSON"),
    ("data_layer: {type: shared_fs}", "data_layer", "remove it"),
    ("resources: {agent_label: a}", "resources.agent_label", "resources.resource_pool"),
    ("security: {}", "security", "remove it"),
    ("tensorboard_storage: {type: s3, bucket: b}", "tensorboard_storage", "remove it"),
    ("checkpoint_storage: {checkpoint_path: a}", "checkpoint_storage.checkpoint_path", "storage_path"),
    ("checkpoint_storage: {tensorboard_path: a}", "checkpoint_storage.tensorboard_path", "storage_path"),
    ("environment: {image: {gpu: a}}", "environment.image.gpu", "environment.image.cuda"),
    (
        "environment: {environment_variables: {gpu: [A=1]}}",
        "environment.environment_variables.gpu",
        "environment.environment_variables.cuda",
    ),
    ("log_policies: [{pattern: a, action: {type: exclude_node}}]", "log_policies.0", "action: exclude_node"),
    (
        "log_policies: [{name: a, action: {type: exclude_node}}]",
        "log_policies.0.action",
        "action: exclude_node",
    ),
    ("entrypoint: model_def:Trial", "entrypoint", "determined_ds.train"),
    ("entrypoint: python3 -m determined.launch.deepspeed --trial a:B", "entrypoint", "determined_ds.train"),
]


@pytest.mark.parametrize(("text", "key", "fix"), DEPRECATED)
def test_what_is_deprecated_is_a_warning_with_its_replacement(text: str, key: str, fix: str) -> None:
    problems, (warning,) = judged(text)
    assert problems == []
    assert (warning.key, warning.code, warning.origin) == (key, "deprecated-key", "a.yaml:1")
    assert fix in warning.fix


def test_every_row_of_the_table_has_a_case_above() -> None:
    assert {key for key, _, _ in TABLE} <= {key for _, key, _ in DEPRECATED}


def test_a_null_is_not_deprecated_and_what_is_refused_is_not_warned_of() -> None:
    assert judged("scheduling_unit:\ndata_layer:\nsecurity:") == ([], [])
    problems, warnings = judged("scheduling_unit: x")
    assert [problem.key for problem in problems] == ["scheduling_unit"]
    assert warnings == []
