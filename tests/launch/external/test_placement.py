"""Environment variables of a launcher -> the place of a rank; a shell, a script or a task is none."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.errors import ConfigError
from determined_ds.launch.external.placement import PORTS, Placement, placement_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
DEEPSPEED = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "8",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
# A task of `srun`, and what its job's batch script has.
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "8(x2)",
}
SCRIPT = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "77"}
TASK = {
    **SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
MINIMAL = {  # what a stand-in of srun's may set
    **{name: value for name, value in JOB.items() if name != "SLURM_TASKS_PER_NODE"},
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-node1-77@1",
    "MASTER_ADDR": "node1",
}
HYDRA = {
    "PMI_RANK": "9",
    "PMI_SIZE": "16",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
PLAIN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
POD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def hostnames(nodes: str) -> list[str]:
    """``scontrol show hostnames``."""
    assert nodes == "node[1-2]"
    return ["node1", "node2"]


def found(environment: dict[str, str], *, interactive: bool = False) -> Placement | None:
    return placement_of(environment, interactive=interactive, hostnames=hostnames)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        ({**TASK, **TORCHRUN}, "torchrun"),  # one that srun started on each machine
        (DEEPSPEED, "deepspeed"),
        (TASK, "srun"),
        ({**TASK, "MASTER_ADDR": "node1"}, "srun"),
        ({**TASK, "PMI_RANK": "9", "PMI_SIZE": "16"}, "srun"),  # with --mpi=pmi2
        (OPENMPI, "mpirun"),
        ({**TASK, "SLURM_PROCID": "1", **OPENMPI}, "mpirun"),  # whose daemons srun started
        (HYDRA, "mpiexec"),
        ({**TASK, "SLURM_PROCID": "1", **HYDRA}, "mpiexec"),
        (PLAIN, "the environment"),
    ],
)
def test_each_launcher_says_the_same_in_its_own_words(environment: dict[str, str], launcher: str) -> None:
    placed = found(environment)
    assert placed is not None
    assert placed.launcher == launcher
    assert (placed.rank, placed.size, placed.local_rank, placed.local_size) == (9, 16, 1, 8)
    assert (placed.machine, placed.machines, placed.master_addr) == (1, 2, "node1")
    assert placed.master_port == 29500 or placed.master_port in PORTS


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # machines of different sizes
        ({**TASK, "SLURM_TASKS_PER_NODE": "12,4", "SLURM_PROCID": "13"}, (13, 16, 1, 4, 1, 2)),
        # a step of some of a job's tasks
        (
            {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
             "SLURM_PROCID": "1", "SLURM_NODEID": "0"},
            (1, 2, 1, 2, 0, 1),
        ),
        (MINIMAL, (0, 16, 0, 8, 0, 2)),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (0, 1, 0, 1, 0, 1)),
        # the operator of Kubernetes names a pod, not a rank of it
        ({**POD, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (1, 4, 0, 1, 1, 4)),
    ],
)  # fmt: skip
def test_machines_and_ranks_on_them(environment: dict[str, str], expected: tuple[int, ...]) -> None:
    placed = found(environment)
    assert placed is not None
    assert (
        placed.rank,
        placed.size,
        placed.local_rank,
        placed.local_size,
        placed.machine,
        placed.machines,
    ) == expected


def test_ranks_of_one_job_meet_at_one_port_and_those_of_two_steps_at_two() -> None:
    def port(**more: str) -> int:
        placed = found({**TASK, **more})
        assert placed is not None
        return placed.master_port

    assert port() == port(SLURM_PROCID="8", SLURM_LOCALID="0")
    assert port() != port(SLURM_STEP_ID="1")
    assert port() != port(SLURM_JOB_ID="4712")
    assert port(MASTER_PORT="31000") == 31000


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "LOCAL_SIZE": "8",
            "OMP_NUM_THREADS": "4",
            "MASTER_ADDR": "node1",
        },  # of a cluster's hook, of a shell
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},  # of an image
        {"DET_TASK_TYPE": "TRIAL", **TORCHRUN},  # of a cluster's task, which starts determined_ds.train
        {"DET_DS_PARENT": "77", **DEEPSPEED},  # below a rank of our own launcher
        SCRIPT,  # a batch script, without srun
        JOB,  # a shell of salloc
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # of `srun --pty bash`
        {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # of salloc's interactive step
    ],
)
def test_a_shell_a_script_or_a_task_is_no_rank(environment: dict[str, str]) -> None:
    assert found(environment) is None


def test_a_terminal_that_srun_gave_is_no_rank_and_what_is_started_in_it_is() -> None:
    shell = {**TASK, "SLURM_PTY_PORT": "4444", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert found(shell, interactive=True) is None
    assert found(shell, interactive=False) is not None


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "missing", "fix"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "without RANK"),
        (without(PLAIN, "LOCAL_RANK"), "LOCAL_RANK is not", "torchrun"),
        (POD, "LOCAL_RANK", "torchrun"),  # several on one machine could not be told from one on each
        (without(TORCHRUN, "GROUP_RANK"), "GROUP_RANK missing", "set all of them"),
        (without(DEEPSPEED, "MASTER_PORT"), "MASTER_PORT missing", "set all of them"),
        (without(OPENMPI, "MASTER_ADDR"), "MASTER_ADDR missing", "add -x MASTER_ADDR=$(hostname) to mpirun"),
        (without(OPENMPI, "PMIX_NAMESPACE"), "MASTER_PORT missing", "add -x MASTER_PORT=29500 to mpirun"),
        (without(HYDRA, "MASTER_ADDR"), "MASTER_ADDR missing", "-genv MASTER_ADDR=$(hostname)"),
        (without(TASK, "SLURM_LOCALID"), "SLURM_LOCALID missing", "srun"),
        (without(TASK, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST missing", "set MASTER_ADDR"),
        ({**MINIMAL, "SLURM_NTASKS": "3"}, "SLURM_STEP_TASKS_PER_NODE missing", "--ntasks-per-node"),
        ({**PLAIN, "RANK": "first"}, "must be a number", ""),
        # ranks in turns over the machines
        ({**TASK, "SLURM_PROCID": "3"}, "one after the other", "srun --distribution=block"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "3"}, "one after the other", "mpirun --map-by slot"),
    ],
)
def test_what_is_missing_is_named_with_what_sets_it(
    environment: dict[str, str], missing: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        found(environment)
    assert missing in str(refused.value)
    assert fix in str(refused.value)


def test_all_that_a_rank_needs_goes_on_in_the_names_of_torchrun_and_deepspeed() -> None:
    placed = found(OPENMPI)
    assert placed is not None
    variables: dict[str, Any] = {**placed.variables(), "TORCHELASTIC_RUN_ID": "none"}
    again = found(variables)
    assert again is not None
    assert again.variables() == placed.variables()
