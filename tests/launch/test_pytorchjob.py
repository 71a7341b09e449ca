"""``launch/pytorchjob.yaml``: what the operator accepts, and a command that torchrun and ``det-ds`` understand."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from determined_ds.cli.main import main
from determined_ds.cli.run import run
from tests.ranks import ROOT

# What of the operator's own rules the manifest touches. Source: ``pytorch_types.go``, ``pytorchjob_webhook.go`` and
# ``common_types.go`` of kubeflow/training-operator (API v1).
REPLICA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {
            "type": "object",
            "required": ["spec"],
            "properties": {
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": {
                        "containers": {
                            "type": "array",
                            "items": {
                                "required": ["name", "image"],
                                "properties": {"image": {"minLength": 1}},
                            },
                            "contains": {"properties": {"name": {"const": "pytorch"}}},
                        }
                    },
                }
            },
        },
    },
}
MASTER = {**REPLICA, "properties": {**REPLICA["properties"], "replicas": {"const": 1}}}
SCHEMA = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"properties": {"name": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": {"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
                "elasticPolicy": {"type": "object"},
                "runPolicy": {
                    "additionalProperties": False,
                    "properties": {
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "backoffLimit": {"type": "integer"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "additionalProperties": False,
                    "properties": {"Master": MASTER, "Worker": REPLICA},
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((ROOT / "launch" / "pytorchjob.yaml").read_text())


def containers(job: Any) -> list[Any]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return [replica["template"]["spec"]["containers"][0] for replica in replicas.values()]


def test_the_operator_accepts_it(job: Any) -> None:
    jsonschema.validate(job, SCHEMA)


def test_every_machine_does_the_same_with_a_rank_for_each_of_its_gpus(job: Any) -> None:
    master, worker = containers(job)
    assert master == worker
    assert master["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    mounted = {mount["name"] for mount in master["volumeMounts"]}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert {volume["name"] for volume in replica["template"]["spec"]["volumes"]} == mounted


def test_its_command_is_one_that_torchrun_and_det_ds_understand_and_can_run(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    machines = sum(replica["replicas"] for replica in replicas)
    per_machine = int(job["spec"]["nprocPerNode"])
    operators = {
        "NNODES": machines,
        "NPROC_PER_NODE": per_machine,
        "NODE_RANK": 1,
        "MASTER_ADDR": "gpt2-master-0",
    }
    for name, value in operators.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    program, *words = containers(job)[0]["command"]
    assert program == "torchrun"
    asked = get_args_parser().parse_args(words)
    assert (int(asked.nnodes.split(":")[0]), int(asked.nproc_per_node)) == (machines, per_machine)
    assert (asked.node_rank, asked.master_addr) == (1, "gpt2-master-0")
    assert (asked.module, asked.training_script) == (True, "determined_ds.cli")

    command, *rest = asked.training_script_args
    assert command == "run"
    monkeypatch.chdir(ROOT)
    given = run.make_context("run", rest).params
    assert given["resume"]
    assert given["run_dir"].is_absolute()
    checked = CliRunner().invoke(
        main, ["check", str(given["config"]), "--slots", str(machines * per_machine)]
    )
    assert checked.exit_code == 0, checked.output
