"""``launch/pytorchjob.yaml``: every machine does the same, by a command that torchrun and ``det-ds`` understand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from determined_ds.cli.main import main
from tests.harness.ranks import ROOT


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((ROOT / "launch" / "pytorchjob.yaml").read_text())


def containers(job: Any) -> list[Any]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return [replica["template"]["spec"]["containers"][0] for replica in replicas.values()]


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
    master, worker = containers(job)
    assert master == worker
    program, *words = master["command"]
    assert program == "torchrun"
    asked = get_args_parser().parse_args(words)
    assert (int(asked.nnodes.split(":")[0]), int(asked.nproc_per_node)) == (machines, per_machine)
    assert (asked.node_rank, asked.master_addr) == (1, "gpt2-master-0")
    assert (asked.module, asked.training_script) == (True, "determined_ds.cli")

    command, *rest = asked.training_script_args
    assert command == "run"
    monkeypatch.chdir(ROOT)
    assert "--resume" in rest
    assert Path(rest[rest.index("--run-dir") + 1]).is_absolute()
    config = next(word for word in rest if word.endswith(".yaml"))
    parsed = CliRunner().invoke(main, ["run", *rest, "--slots", "none"])
    assert "'none'" in parsed.stderr, "of all options, this one alone is wrong"
    checked = CliRunner().invoke(main, ["check", config, "--slots", str(machines * per_machine)])
    assert checked.exit_code == 0, checked.output
