"""``launch/pytorchjob.yaml``: every machine does the same, by a command that torchrun and ``det-ds`` understand."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from determined_ds.cli.main import main
from tests.harness.ranks import ROOT


def test_its_command_is_one_that_torchrun_and_det_ds_understand(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = yaml.safe_load((ROOT / "launch" / "pytorchjob.yaml").read_text())["spec"]
    replicas = [*spec["pytorchReplicaSpecs"].values()]
    machines, per_machine = sum(each["replicas"] for each in replicas), int(spec["nprocPerNode"])
    operators = {"NNODES": machines, "NPROC_PER_NODE": per_machine, "NODE_RANK": 1, "MASTER_ADDR": "master"}
    for name, value in operators.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    master, worker = (each["template"]["spec"]["containers"][0] for each in replicas)
    assert master == worker
    program, *words = master["command"]
    assert program == "torchrun"
    asked = get_args_parser().parse_args(words)
    assert (int(asked.nnodes.split(":")[0]), int(asked.nproc_per_node)) == (machines, per_machine)
    assert (asked.node_rank, asked.master_addr) == (1, "master")
    assert (asked.module, asked.training_script) == (True, "determined_ds.cli")
    command, config, *rest = asked.training_script_args
    assert (command, "--resume" in rest) == ("run", True)
    monkeypatch.chdir(ROOT)
    parsed = CliRunner().invoke(main, ["run", config, *rest, "--slots", "none"])
    assert "'none'" in parsed.stderr, "of all options, this one alone is wrong"
    checked = CliRunner().invoke(main, ["check", config, "--slots", str(machines * per_machine)])
    assert checked.exit_code == 0, checked.output
