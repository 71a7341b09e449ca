"""``det-ds run`` as one rank of torchrun, mpirun or deepspeed: what it trains, and what it is told by its launcher.

Two machines are two network namespaces with a cable between them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.cli.own_runs import LOSS, OWN_MODEL, edit, losses, result, same_weights, steps
from tests.harness.machines import Machine
from tests.harness.ranks import ROOT, free_port
from tests.harness.required import skip_or_fail
from tests.package import checkpoints

TIMEOUT_S = 200.0  # a guard against hangs
# torchrun, which before a restart waits 3 s, not 30, for a rank that cannot end since it waits for one that was killed.
TORCHRUN = """
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import main

LocalElasticAgent._shutdown.__defaults__ = (LocalElasticAgent._shutdown.__defaults__[0], 3)
main()
"""


def torchrun_on(
    machines: tuple[Machine, Machine], *words: str | Path, restarts: int = 0, **env: str
) -> list[tuple[int, str]]:
    """``det-ds run`` under one ``torchrun`` of one rank on each. Returns the exit code and the output of both."""
    where = f"{machines[0].address}:{free_port()}"
    started = []
    for number, machine in enumerate(machines):
        meet = ["--master_addr", machines[0].address, "--master_port", where.partition(":")[2]]
        meet += ["--node_rank", str(number)]
        if restarts:
            meet = ["--max_restarts", str(restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", where]
            meet += ["--rdzv_conf", f"is_host={1 - number}"]
        torchrun = ["-c", TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", *meet]
        rank = ["-m", "determined_ds.cli", "run", *map(str, words), "--accelerator", "cpu"]
        started.append(machine.start([sys.executable, *torchrun, *rank], env=env))
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.fixture
def shared_model(machines: tuple[Machine, Machine]) -> Path:
    """``own_model``, where both machines see it."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(OWN_MODEL, machines[0].shared / "model", ignore=ignored))


def program(*words: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """A launcher to its end; its ranks are programs."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.long("the same numbers; that a killed rank is started again on two machines is short")
def test_torchrun_on_two_machines_trains_what_one_machine_trains_bit_for_bit(
    machines: tuple[Machine, Machine], shared_model: Path, trained: Path
) -> None:
    """Its environment is the experiment's before torch is loaded, as under our own launcher."""
    run_dir = machines[0].shared / "run"
    expected = {"MINE": 'a $b "c" (d)', "UNWANTED": None, "DS_ACCELERATOR": "cpu"}
    seen = f"import os\nassert {{name: os.environ.get(name) for name in {[*expected]}}} == {expected}\n"
    edit(shared_model / "trial.py", "import torch\n", f"{seen}import torch\n")
    with (shared_model / "experiment.yaml").open("a") as config:
        config.write("environment:\n  environment_variables: ['MINE=a $b \"c\" (d)', UNWANTED]\n")
    words = (shared_model / "experiment.yaml", shared_model, "--run-dir", run_dir)
    sets = ("--set", "resources.slots_per_trial=5")
    ended = torchrun_on(machines, *words, *sets, UNWANTED="1")
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(run_dir) == losses(trained / "run")
    assert same_weights(checkpoints(run_dir)[0], checkpoints(trained / "run")[0])
    assert "batch 6/6" in ended[0][1]
    assert "batch" not in ended[1][1]  # rank 0 shows it


@pytest.mark.long("two machines once more; torchrun on two of them stays")
def test_a_run_directory_that_is_not_shared_is_refused_before_training(
    machines: tuple[Machine, Machine], shared_model: Path
) -> None:
    private = machines[0].shared / "runs"
    private.mkdir()
    mounted = machines[1].run(["mount", "-t", "tmpfs", "none", private])
    assert mounted.returncode == 0, mounted.stdout
    words = (shared_model / "experiment.yaml", shared_model, "--run-dir", private / "run")
    ended = torchrun_on(machines, *words)
    assert [code for code, _ in ended] == [1, 1]  # torchrun's own, whatever its ranks end with
    assert "must be shared by all machines: machine1 does not see what rank 0 wrote" in ended[0][1]
    assert all("exitcode  : 2" in text for _, text in ended)


DIES = """
import os, signal
from pathlib import Path

def die(when):
    flag = Path(os.environ["KILLED"], when)
    if os.environ.get("RANK") == os.environ["VICTIM"] and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)

die("starting")
"""
IN_BATCH_5 = """
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 5:
            die("training")
"""


@pytest.mark.parametrize(
    "victim", ["1", pytest.param("0", marks=pytest.mark.long("the same with the rank of the other machine"))]
)
def test_a_rank_that_is_killed_on_either_machine_is_started_again_and_the_run_goes_on(
    victim: str, machines: tuple[Machine, Machine], shared_model: Path, trained: Path
) -> None:
    """torchrun counts the first kill on the victim's machine alone: the other rank waits, and is healthy."""
    run_dir, killed = machines[0].shared / "run", machines[0].shared / "killed"
    killed.mkdir()
    trial = shared_model / "trial.py"
    edit(trial, LOSS, IN_BATCH_5 + LOSS)
    edit(trial, "from typing import Any\n", f"from typing import Any\n{DIES}")
    words = (shared_model / "experiment.yaml", shared_model, "--run-dir", run_dir)
    ended = torchrun_on(machines, *words, restarts=3, KILLED=str(killed), VICTIM=victim)
    said = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0], said
    assert {path.name for path in killed.iterdir()} == {"starting", "training"}
    assert "no checkpoint found; starting from step 0" in said
    assert "resume     batch 2, checkpoint" in said or "resume     batch 4, checkpoint" in said
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert same_weights(checkpoints(run_dir)[0], checkpoints(trained / "run")[0])


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ("0", "machine 1: rank 1 has not come within 3 s; here: "),
        ("1", "cannot reach rank 0 (machine 0, 127.0.0.1:"),
    ],
)
def test_a_rank_that_never_comes_is_named_with_its_machine(
    rank: str, said: str, own_model: Path, tmp_path: Path
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"DETERMINED_DS_JOIN_TIMEOUT": "0.05"}
    words = ["run", own_model / "experiment.yaml", own_model, "--run-dir", tmp_path / "run"]
    done = program(sys.executable, "-m", "determined_ds.cli", *words, "--accelerator", "cpu", **place)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long("one more launcher; torchrun's ranks are short")
@pytest.mark.programs
def test_two_ranks_of_mpirun_train_what_our_own_has_two_train(
    own_model: Path, trained: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    if not shutil.which("mpirun"):
        skip_or_fail("mpi", "there is no mpirun here")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = ["mpirun", *as_root, "--oversubscribe", "-np", "2", sys.executable, "-m", "determined_ds.cli"]
    words = ["run", own_model / "experiment.yaml", own_model, "--run-dir", run_dir, "--accelerator", "cpu"]
    done = program(*start, *words, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run_dir) == losses(trained / "run")
    assert same_weights(checkpoints(run_dir)[0], checkpoints(trained / "run")[0])


AGENT_DIES = """
        import os, pathlib, signal
        if self.context._current_batch_idx == 3 and model.training and self.context.distributed.rank == 1:
            status = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
"""


@pytest.mark.programs
@pytest.mark.long("torchrun waits for the machine that is gone; other ranks continue in interrupted/")
def test_under_torchrun_the_machine_that_is_left_continues(
    own_model: Path, trained: Path, tmp_path: Path
) -> None:
    """Two of its agents with a rank each, of which one is killed with its rank in the fourth batch."""
    edit(own_model / "trial.py", LOSS, AGENT_DIES + LOSS)
    words = ["torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"]
    # Outlives either of them.
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{store.port}"]
    words += ["--rdzv_conf", "last_call_timeout=5,is_host=0,keep_alive_interval=1"]
    words += ["--local_addr", "127.0.0.1", "-m", "determined_ds.cli", "run"]
    words += [str(own_model / "experiment.yaml"), str(own_model), "--accelerator", "cpu"]
    command = [sys.executable, "-m", *words, "--run-dir", str(tmp_path / "run"), "--resume"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert sorted(agent.returncode for agent in agents) == [-9, 0], said
    assert any("resources.slots_per_trial: 2 -> 1" in each for each in said)
    assert losses(tmp_path / "run") == pytest.approx(losses(trained / "run"), rel=1e-6)
    assert result(tmp_path / "run")["slots"] == 1
