"""Environment variables of a launcher make a process one of its ranks; a shell, a script or a task is none."""

from __future__ import annotations

import pytest

from tests.package import place_of_rank, refusal

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PLAIN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **MASTER}
TORCHRUN = {**PLAIN, "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", **MASTER}
DEEPSPEED |= {"LOCAL_SIZE": "8", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
# What the batch script of a SLURM job has, and a task of ``srun`` in it.
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_NNODES": "2"}
JOB |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)"}
TASK = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}
TASK |= {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-1@1", "MASTER_ADDR": "node1"}
NUMBERS = ("rank", "size", "local_rank", "local_size", "machine", "machines")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (TASK, "srun"),
        (OPENMPI, "mpirun"),
        ({**TASK, "SLURM_PROCID": "1", **OPENMPI}, "mpirun"),  # its daemons were started by srun
        (PLAIN, "the environment"),
    ],
)
def test_each_launcher_says_the_same_in_its_own_words(environment: dict[str, str], launcher: str) -> None:
    found = place_of_rank(environment)
    assert found is not None
    assert found["launcher"] == launcher
    assert tuple(found[name] for name in NUMBERS) == (9, 16, 1, 8, 1, 2)
    assert found["master_addr"] == "node1"


def test_ranks_of_one_job_meet_at_one_port_and_those_of_two_steps_at_two() -> None:
    def port(**more: str) -> int:
        found = place_of_rank({**TASK, **more})
        assert found is not None
        return int(found["master_port"])

    assert port() == port(SLURM_PROCID="8", SLURM_LOCALID="0")
    assert port() != port(SLURM_STEP_ID="1")
    assert port() != port(SLURM_JOB_ID="4712")
    assert port(MASTER_PORT="31000") == 31000


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_SIZE": "8", "MASTER_ADDR": "node1"},  # of a cluster's hook, of a shell
        {"DET_TASK_TYPE": "TRIAL", **TORCHRUN},  # of a cluster's task, which starts determined_ds.train
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # of `srun --pty bash`
        {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # of salloc's interactive step
    ],
)
def test_a_shell_a_script_or_a_task_is_no_rank(environment: dict[str, str]) -> None:
    assert place_of_rank(environment) is None


@pytest.mark.parametrize(
    ("environment", "missing", "fix"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT, MASTER_ADDR", "without RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "no valid RANK", "without RANK"),
        ({**OPENMPI, "MASTER_ADDR": ""}, "no valid MASTER_ADDR", "add -x MASTER_ADDR=$(hostname) to mpirun"),
        ({**TASK, "SLURM_PROCID": "3"}, "one after the other", "--distribution=block"),  # in turns
    ],
)
def test_what_is_missing_is_named_with_what_sets_it(
    environment: dict[str, str], missing: str, fix: str
) -> None:
    told = str(refusal(lambda: place_of_rank(environment)))
    assert missing in told
    assert fix in told
