"""Which rank of another launcher this process is, from its environment alone. Loads no torch.

The most specific launcher is tried first: ``mpirun`` inside a SLURM job has SLURM's variables too, and torchrun inside
``srun`` both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT

Environment = Mapping[str, str]

TORCHRUN, DEEPSPEED, OPENMPI, SLURM = "torchrun", "deepspeed", "mpirun", "srun"
PLAIN = "the environment"
# Rank and ranks, among all and on this machine; machine and machines.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# Source: ``main`` in deepspeed 0.19.8's ``launcher/launch.py``.
OF_DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
OF_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
OF_SLURM_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID", "SLURM_JOB_ID")
LOOPBACK = "127.0.0.1"
PORTS = range(12_000, 32_000)  # below the ephemeral ones
LAST_STEP = (
    4_294_967_279  # of srun's; those above are a batch script's, salloc's shell ... Source: slurm/slurm.h
)
IDS_OF_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")  # of a run


@dataclass(frozen=True)
class Placement:
    """The place of this process among the ranks of a launcher."""

    rank: int  # from 0
    size: int  # ranks in all
    local_rank: int  # among those of its machine
    local_size: int  # ranks of its machine
    machine: int  # number of its machine, from 0
    machines: int
    launcher: str  # its name, for people
    master_addr: str = LOOPBACK  # where rank 0 can be reached
    master_port: int = 0  # a port there; torchrun listens at it already

    def fewer(self) -> Iterator[Placement]:
        """The same with fewer ranks, the most first: whole machines, or some ranks of one."""
        for size in range(self.size - 1, 0, -1):
            if size % self.local_size == 0 or size < self.local_size:
                local_size = min(size, self.local_size)
                yield replace(self, size=size, local_size=local_size, machines=size // local_size)

    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun and DeepSpeed's launcher set."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.machine, self.machines)
        named = {
            name: str(n)
            for names in (OF_TORCHRUN, OF_DEEPSPEED)
            for name, n in zip(names, numbers, strict=True)
        }
        return {**named, "MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}


def placement_here() -> Placement | None:
    """The place of this process among the ranks of another launcher; None where none started it."""
    pid, _, launcher = os.environ.get(LAUNCHED_BY, "").partition(" ")
    if pid == str(os.getpid()):  # and of no process below it
        return replace(_stated(os.environ, TORCHRUN, OF_TORCHRUN), launcher=launcher)
    return placement_of(os.environ)


def placement_of(environment: Environment) -> Placement | None:
    """The place of this process, or None where no launcher started it."""
    if PARENT in environment or environment.get("DET_TASK_TYPE") == "TRIAL":
        return None  # below a rank of our own launcher, or of Determined's
    # A batch script has SLURM_PROCID as well, but its step is none of srun's, like that of a shell of salloc.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    step = environment.get("SLURM_STEP_ID", "")
    in_step = tasks != "1" and step.isdigit() and int(step) <= LAST_STEP
    if "TORCHELASTIC_RUN_ID" in environment:
        return _stated(environment, TORCHRUN, OF_TORCHRUN)
    if "RANK" in environment and "CROSS_SIZE" in environment:
        return _stated(environment, DEEPSPEED, OF_DEEPSPEED)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _openmpi(environment)
    if in_step:
        return _slurm(environment)
    if "RANK" in environment and environment.get("WORLD_SIZE") != "1":  # set by a script
        return _stated(environment, PLAIN, OF_TORCHRUN[:4], "torchrun")
    return None


def _stated(
    environment: Environment, launcher: str, names: tuple[str, ...], in_blocks: str = ""
) -> Placement:
    """The place that a launcher states; it leaves the machines out where its ranks lie there in blocks."""
    numbers = _numbers(environment, launcher, (*names, "MASTER_PORT"), ("MASTER_ADDR",))
    rank, size, local_rank, local_size, *rest, port = numbers
    machine, machines = rest or (rank // local_size, size // local_size)
    if in_blocks and (size % local_size or rank % local_size != local_rank):
        raise _out_of_order(launcher, rank, local_rank, local_size, in_blocks)
    address = environment["MASTER_ADDR"]
    return Placement(rank, size, local_rank, local_size, machine, machines, launcher, address, port)


def _openmpi(environment: Environment) -> Placement:
    _, size, _, local_size = _numbers(environment, OPENMPI, OF_OPENMPI)
    nodes = None if size == local_size else environment.get("SLURM_JOB_NODELIST", "")
    job = next((environment[name] for name in IDS_OF_MPI if environment.get(name)), "" if size == 1 else None)
    number = None if job is None else zlib.crc32(job.encode())
    found, missing = _meeting_point(environment, nodes, number)
    if missing:
        wanted = " ".join(f"-x {name}={'$(hostname)' if 'ADDR' in name else 29500}" for name in missing)
        raise _incomplete(OPENMPI, missing, f"add {wanted} to mpirun")
    return _stated(found, OPENMPI, OF_OPENMPI, "mpirun --map-by slot")


def _slurm(environment: Environment) -> Placement:
    rank, local_rank, machine = _numbers(environment, SLURM, OF_SLURM)
    size, machines, step, job = _numbers(environment, SLURM, OF_SLURM_STEP)
    local_size = size // machines
    if size % machines or rank != machine * local_size + local_rank:
        use = "srun --ntasks-per-node N --distribution=block"
        raise _out_of_order(SLURM, rank, local_rank, local_size, use)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    found, missing = _meeting_point(environment, None if machines == 1 else nodes, 101 * job + step)
    if missing:
        raise _incomplete(SLURM, missing, "set them, or start the ranks in a SLURM job")
    places = map(str, (rank, size, local_rank, local_size, machine, machines))
    return _stated({**found, **dict(zip(OF_TORCHRUN, places, strict=True))}, SLURM, OF_TORCHRUN)


def _meeting_point(
    environment: Environment, nodes: str | None, job: int | None
) -> tuple[dict[str, str], list[str]]:
    """An environment with the address and the port where ranks meet, and which of them is not known.

    What it states goes first. ``nodes`` are SLURM's machines, whose first has rank 0; None: this machine has all ranks.
    ``job`` is a number that only the ranks of one run have in common.
    """
    address = LOOPBACK if nodes is None else nodes
    if set(address) & set("[,"):
        address = next(iter(_scontrol_hostnames(address)), "")
    port = "" if job is None else str(PORTS.start + job % len(PORTS))
    found = {"MASTER_ADDR": address, "MASTER_PORT": port}
    found = {name: environment.get(name) or value for name, value in found.items()}
    return {**environment, **found}, [name for name, value in found.items() if not value]


# ------------------------------------------------------------------------------------------- reading


def _numbers(
    environment: Environment, launcher: str, names: tuple[str, ...], others: tuple[str, ...] = ()
) -> list[int]:
    """The values of variables that have to be numbers; others have to be there too."""
    missing = [name for name in names if not environment.get(name, "").isdigit()]
    if missing := [*missing, *(name for name in others if not environment.get(name))]:
        fix = "start the ranks by torchrun, srun, mpirun or deepspeed, which set all of them"
        if launcher == PLAIN:
            fix = "set all of them, or start one process without RANK"
        raise _incomplete(launcher, missing, fix)
    return [int(environment[name]) for name in names]


def _incomplete(launcher: str, missing: list[str], fix: str) -> ConfigError:
    message = f"{launcher} makes this process a rank, but does not say which: no valid {', '.join(missing)}"
    return ConfigError(Problem(key="the environment", message=message, fix=fix, code="launcher"))


def _out_of_order(launcher: str, rank: int, local_rank: int, local_size: int, use: str) -> ConfigError:
    message = (
        f"{launcher} gave this machine's rank {local_rank} of {local_size} the number {rank}: "
        "the ranks of a machine must be numbered one after the other, as many on each machine"
    )
    return ConfigError(Problem(key="the environment", message=message, fix=f"use {use}", code="launcher"))


def _scontrol_hostnames(nodes: str) -> list[str]:
    """The names in a list of SLURM's, by SLURM's own command; none where it is not installed."""
    if shutil.which("scontrol") is None:
        return []
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    return done.stdout.split()
