"""The models, the tables of keys and the master's schemas name the same keys; nobody else pays for pydantic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from determined_ds.experiment import experiment as tables
from determined_ds.experiment.schema import environment, searcher, storage
from determined_ds.experiment.schema import parameters as hyperparameters
from determined_ds.experiment.schema import root as experiment
from determined_ds.experiment.schema.section import Section
from determined_ds.experiment.space.space import SPEC_FIELDS
from tests.experiments.master_schemas import SCHEMA_DIR

MODELS: dict[str, type[Section]] = {
    "azure": storage.Azure,
    "bind-mount": experiment.BindMount,
    "checkpoint-storage": storage.UnknownStorage,
    "device": experiment.Device,
    "directory": storage.Directory,
    "environment": environment.Environment,
    "environment-image-map": environment.ImageMap,
    "environment-variables-map": environment.VariablesMap,
    "experiment": experiment.ExperimentConfig,
    "gcs": storage.GCS,
    "hpc-cluster-pbs": experiment.Pbs,
    "hpc-cluster-slurm": experiment.Slurm,
    "hyperparameter-categorical": hyperparameters.Categorical,
    "hyperparameter-const": hyperparameters.Constant,
    "hyperparameter-double": hyperparameters.Double,
    "hyperparameter-int": hyperparameters.Int,
    "hyperparameter-log": hyperparameters.Log,
    "integrations": experiment.Integrations,
    "kerberos": experiment.Kerberos,
    "log-legacy-action-cancel-retries": experiment.LegacyAction,
    "log-policy": experiment.LogPolicy,
    "optimizations": experiment.Optimizations,
    "pachyderm": experiment.Pachyderm,
    "pachyderm-dataset": experiment.PachydermDataset,
    "pachyderm-pachd": experiment.Pachd,
    "pachyderm-proxy": experiment.PachydermProxy,
    "profiling": experiment.Profiling,
    "proxy-port": environment.ProxyPort,
    "registry-auth": environment.RegistryAuth,
    "reproducibility": experiment.Reproducibility,
    "resources": experiment.Resources,
    "retention-policy": experiment.RetentionPolicy,
    "s3": storage.S3,
    "searcher": searcher.UnknownSearcher,
    "searcher-adaptive-asha": searcher.AdaptiveASHA,
    "searcher-async-halving": searcher.AsyncHalving,
    "searcher-grid": searcher.Grid,
    "searcher-random": searcher.Random,
    "searcher-single": searcher.Single,
    "security": experiment.Security,
    "shared-fs": storage.SharedFS,
    "webhooks": experiment.Webhooks,
}


@pytest.mark.parametrize("schema", MODELS)
def test_a_model_has_the_keys_of_its_schema(schema: str) -> None:
    properties = json.loads((SCHEMA_DIR / f"{schema}.json").read_text())["properties"]
    assert MODELS[schema].model_fields.keys() == properties.keys()


def test_every_schema_of_a_mapping_has_a_model() -> None:
    others = {f"searcher-{name.replace('_', '-')}" for name in searcher.REMOVED}
    others.add("log-legacy-action-exclude-node")
    with_keys = {
        path.stem for path in SCHEMA_DIR.glob("*.json") if "properties" in json.loads(path.read_text())
    }
    assert with_keys == MODELS.keys() | others


def test_the_tables_that_are_read_without_pydantic_agree() -> None:
    assert experiment.ExperimentConfig.model_fields.keys() == tables.EXPERIMENT_KEYS
    assert experiment.Resources.model_fields.keys() == tables.RESOURCES_KEYS
    assert experiment.Reproducibility.model_fields.keys() == tables.REPRODUCIBILITY_KEYS
    kinds = (searcher.Single, searcher.Random, searcher.Grid, searcher.AdaptiveASHA, searcher.AsyncHalving)
    assert {key for kind in kinds for key in kind.model_fields} == tables.SEARCHER_KEYS
    assert [kind.model_fields["name"].annotation.__args__[0] for kind in kinds] == list(tables.SEARCHERS)  # type: ignore[union-attr]
    specs = {
        "categorical": hyperparameters.Categorical,
        "const": hyperparameters.Constant,
        "double": hyperparameters.Double,
        "int": hyperparameters.Int,
        "log": hyperparameters.Log,
    }
    assert {kind: {"type", *fields} for kind, fields in SPEC_FIELDS.items()} == {
        kind: set(model.model_fields) for kind, model in specs.items()
    }


def test_pydantic_is_loaded_when_a_config_is_judged_and_not_before() -> None:
    program = """
import sys
import determined_ds.experiment.experiment
from determined_ds.documents.document import Document
from determined_ds.experiment.schema import experiment_problems
assert "pydantic" not in sys.modules
assert experiment_problems(Document(name="a", data={}))[0]
assert "pydantic" in sys.modules
assert not {"torch", "deepspeed", "determined", "jsonschema"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
