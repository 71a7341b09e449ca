"""``det-ds run`` as one rank of torchrun, on two machines: two network namespaces with a cable between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import load_state_dict_from_checkpoint_path
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.conclusion import read_result
from determined_ds.protocol.run_dir import RunDir
from tests.cli.conftest import OWN_MODEL
from tests.command import det_ds
from tests.machines import Machine
from tests.ranks import ROOT, free_port

TIMEOUT_S = 200.0  # a guard against hangs
# Of the rank, and of nothing else: which is not the same in two trainings of the same.
MEMORY = ("peak_memory_gib", "peak_memory_gib_min", "memory_allocated_gb", "memory_reserved_gb")
CLOCKS = ("samples_per_second", *MEMORY)


def torchrun_on(
    machines: tuple[Machine, Machine], *words: str | Path, env: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """``det-ds run`` under one ``torchrun`` of one rank on each. Returns the exit code and the output of both."""
    port = free_port()
    started = []
    for number, machine in enumerate(machines):
        where = ["--master_addr", machines[0].address, "--master_port", port, "--node_rank", number]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            2,
            "--nproc_per_node",
            1,
            *where,
        ]
        rank = ["-m", "determined_ds.cli", "run", *words, "--accelerator", "cpu"]
        started.append(machine.start([str(word) for word in (*torchrun, *rank)], env=env))
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.fixture
def shared_model(machines: tuple[Machine, Machine]) -> Path:
    """``own_model``, where both machines see it."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(OWN_MODEL, machines[0].shared / "model", ignore=ignored))


def tell_environment(copied: Path, seen: Path) -> None:
    """Have each rank write down the environment that it loads torch with."""
    trial = copied / "trial.py"
    tell = 'Path(os.environ["SEEN"], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))\n'
    imports = "import json\nimport os\nfrom pathlib import Path\n"
    text = trial.read_text().replace("from typing import Any\n", f"{imports}from typing import Any\n")
    trial.write_text(text.replace("class TinyTrial", f"{tell}\n\nclass TinyTrial"))
    seen.mkdir()
    experiment = copied / "experiment.yaml"
    variables = f"environment:\n  environment_variables: [SEEN={seen}, 'MINE=a $b \"c\" (d)', UNWANTED]\n"
    experiment.write_text(experiment.read_text() + variables)


def reports(run_dir: Path) -> list[Any]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["time"]
        for name in CLOCKS:
            record["metrics"].pop(name, None)
    return records


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_state_dict_from_checkpoint_path(checkpoints_in(run_dir / "checkpoints")[0].path)


def test_torchrun_on_two_machines_trains_what_one_machine_trains_bit_for_bit(
    machines: tuple[Machine, Machine], shared_model: Path, tmp_path: Path
) -> None:
    config, run_dir = shared_model / "experiment.yaml", machines[0].shared / "run"
    told = machines[0].shared / "seen"
    tell_environment(shared_model, told)
    sets = ["--set", "resources.slots_per_trial=5"]
    ended = torchrun_on(machines, config, shared_model, "--run-dir", run_dir, *sets, env={"UNWANTED": "1"})
    assert [code for code, _ in ended] == [0, 0], ended
    seen = [json.loads((told / str(rank)).read_text()) for rank in range(2)]
    one = det_ds("run", config, shared_model, "--run-dir", tmp_path / "one", "--slots", "2")
    assert one.returncode == 0, one.stderr

    assert reports(run_dir) == reports(tmp_path / "one")
    trained, expected = weights(run_dir), weights(tmp_path / "one")
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    result, expected_result = (read_result(RunDir(folder)) for folder in (run_dir, tmp_path / "one"))
    assert result is not None
    assert expected_result is not None
    for each in (result, expected_result):  # other names of the same checkpoints
        assert each.best
        assert each.checkpoint
        assert each.best.pop("checkpoint")
        assert each.checkpoint.pop("uuid")
    assert replace(result, continued_by=None) == replace(expected_result, continued_by=None)
    there = {path.name for path in (run_dir).iterdir()}
    assert there == {path.name for path in (tmp_path / "one").iterdir()}  # no token is left
    for environment in seen:  # as under our own launcher, before torch was loaded
        assert environment["MINE"] == 'a $b "c" (d)'
        assert "UNWANTED" not in environment
        assert environment["DS_ACCELERATOR"] == "cpu"
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
        assert environment["TOKENIZERS_PARALLELISM"] == "false"
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(shared_model)
    header = ended[0][1]
    assert "launcher   torchrun: 2 ranks on 2 machines, instead of slots_per_trial 5" in header
    assert "batch 6/6" in header
    assert "batch" not in ended[1][1]  # rank 0 shows it


@pytest.mark.long("two machines once more; torchrun on two of them stays")
def test_a_run_directory_that_is_not_shared_is_refused_before_training(
    machines: tuple[Machine, Machine], shared_model: Path
) -> None:
    private = machines[0].shared / "runs"
    private.mkdir()
    mounted = machines[1].run(["mount", "-t", "tmpfs", "none", private])
    assert mounted.returncode == 0, mounted.stdout
    ended = torchrun_on(
        machines, shared_model / "experiment.yaml", shared_model, "--run-dir", private / "run"
    )
    assert [code for code, _ in ended] == [1, 1]  # torchrun's own, whatever its ranks end with
    said = "".join(text for _, text in ended)
    assert said.count("error: --run-dir = ") == 1
    assert "must be shared by all machines: machine1 does not see what rank 0 wrote" in ended[0][1]
    assert "on a file system that every machine mounts" in ended[0][1]
    assert all("exitcode  : 2" in text for _, text in ended)
    assert not (private / "run" / "checkpoints").exists()
    assert json.loads((private / "run" / "result.json").read_text())["status"] == "invalid"


@pytest.mark.long("torchrun starts ranks twice; test_resume has kills, another test here torchrun")
def test_a_rank_that_is_killed_is_started_again_by_torchrun_and_the_run_goes_on(
    own_model: Path, tmp_path: Path
) -> None:
    trial = own_model / "trial.py"
    die = """
        import os, signal
        from pathlib import Path

        self.batches = getattr(self, "batches", 0) + 1
        killed = Path(os.environ["KILLED"])
        if self.batches == 5 and os.environ["RANK"] == "1" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs_B4, targets_B1 = batch"""
    text = trial.read_text().replace("\n        inputs_B4, targets_B1 = batch", die)
    trial.write_text(text)
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    words += ["-m", "determined_ds.cli", "run", str(own_model / "experiment.yaml"), str(own_model)]
    words += ["--run-dir", str(tmp_path / "run"), "--accelerator", "cpu"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "KILLED": str(tmp_path / "killed")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "resume     batch " in done.stdout
    steps = [
        record["steps_completed"] for record in reports(tmp_path / "run") if record["group"] == "training"
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_two_ranks_of_mpirun_train_what_our_own_launcher_has_two_train(
    own_model: Path, tmp_path: Path
) -> None:
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun here")
    words = ["run", str(own_model / "experiment.yaml"), str(own_model)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    rank = [sys.executable, "-m", "determined_ds.cli", *words, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        ["mpirun", *as_root, "--oversubscribe", "-np", "2", *rank, "--accelerator", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "mpirun: 2 ranks on 1 machine" in done.stdout
    one = det_ds(*words, "--run-dir", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    assert reports(tmp_path / "run") == reports(tmp_path / "one")
