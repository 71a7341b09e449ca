"""Which rank of another launcher this process is, from its environment alone. Loads no torch.

The most specific launcher is tried first: ``mpirun`` inside a SLURM job has SLURM's variables too, and torchrun inside
``srun`` both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT

Environment = Mapping[str, str]
Hostnames = Callable[[str], list[str]]

TORCHRUN, DEEPSPEED, OPENMPI, HYDRA, SLURM = "torchrun", "deepspeed", "mpirun", "mpiexec", "srun"
PLAIN = "the environment"
# Rank and ranks, among all and on this machine; machine and machines.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# Source: ``main`` in deepspeed 0.19.8's ``launcher/launch.py``.
OF_DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
OF_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OF_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH's and Intel's
LOOPBACK = "127.0.0.1"
PORTS = range(12_000, 32_000)  # below the ephemeral ones
RESERVED_STEPS = 4_294_967_280  # of salloc's interactive step, a batch script ... Source: slurm/slurm.h
IDS_OF_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMI_JOBID")  # of a run


@dataclass(frozen=True)
class Placement:
    """The place of this process among the ranks of a launcher.

    Args:
        rank: From 0.
        size: Ranks in all.
        local_rank: Among those of its machine.
        local_size: Ranks of its machine.
        machine: Number of its machine, from 0.
        machines: How many there are.
        launcher: Its name, for people.
        master_addr: Where rank 0 can be reached.
        master_port: A port there; torchrun listens at it already.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine: int
    machines: int
    launcher: str
    master_addr: str = LOOPBACK
    master_port: int = 0

    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun and DeepSpeed's launcher set."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.machine, self.machines)
        named = {
            **dict(zip(OF_TORCHRUN, numbers, strict=True)),
            **dict(zip(OF_DEEPSPEED, numbers, strict=True)),
        }
        named |= {"MASTER_PORT": self.master_port}
        return {"MASTER_ADDR": self.master_addr, **{name: str(number) for name, number in named.items()}}


def placement_here() -> Placement | None:
    """The place of this process; see :func:`placement_of`."""
    pid, _, launcher = os.environ.get(LAUNCHED_BY, "").partition(" ")
    if pid == str(os.getpid()):  # and of no process below it
        return replace(_stated(os.environ, TORCHRUN, OF_TORCHRUN), launcher=launcher)
    return placement_of(os.environ, interactive=sys.stdin is not None and sys.stdin.isatty())


def placement_of(
    environment: Environment, *, interactive: bool = False, hostnames: Hostnames | None = None
) -> Placement | None:
    """The place of this process, or None where no launcher started it.

    Args:
        environment: Of the process.
        interactive: Whether its input is a terminal: a shell of ``srun --pty`` has all variables of a task.
        hostnames: Expands a list of SLURM's, e.g. ``node[1-3]``; ``scontrol show hostnames`` if None.

    Raises:
        ConfigError: some of a launcher's variables are missing; they are named.
    """
    if PARENT in environment or environment.get("DET_TASK_TYPE") == "TRIAL":
        return None  # below a rank of our own launcher, or of Determined's
    hosts = hostnames or _scontrol_hostnames
    # A batch script has SLURM_PROCID and SLURM_TASK_PID as well, but no step; a shell of salloc, a reserved one.
    step, tasks = environment.get("SLURM_STEP_ID"), _tasks(environment)
    in_step = "SLURM_PROCID" in environment and tasks != "1"
    in_step = in_step and (step is not None or "SLURM_TASK_PID" not in environment)
    in_step = in_step and not (step and step.isdigit() and int(step) >= RESERVED_STEPS)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _stated(environment, TORCHRUN, OF_TORCHRUN)
    if "RANK" in environment and "CROSS_SIZE" in environment:
        return _stated(environment, DEEPSPEED, OF_DEEPSPEED)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _mpi(environment, OPENMPI, OF_OPENMPI, "mpirun --map-by slot", hosts)
    if "PMI_RANK" in environment and ("MPI_LOCALRANKID" in environment or not in_step):
        return _mpi(environment, HYDRA, OF_HYDRA, "mpiexec -ppn N", hosts)
    if in_step and not (interactive and "SLURM_PTY_PORT" in environment):
        return _slurm(environment, hosts)
    if "RANK" in environment and environment.get("WORLD_SIZE") != "1":
        return _plain(environment)
    return None


def _stated(
    environment: Environment, launcher: str, names: tuple[str, ...], in_blocks: str = ""
) -> Placement:
    """The place that a launcher states; it leaves the machines out where its ranks lie there in blocks."""
    rank, size, local_rank, local_size, *rest = _numbers(environment, launcher, names)
    machine, machines = rest or (rank // local_size, size // local_size)
    if in_blocks and (size % local_size or rank % local_size != local_rank):
        raise _out_of_order(launcher, rank, local_rank, local_size, in_blocks)
    [port] = _numbers(environment, launcher, ("MASTER_PORT",))
    if not environment.get("MASTER_ADDR"):
        raise _incomplete(launcher, ["MASTER_ADDR"], "set it to the address of the first machine")
    address = environment["MASTER_ADDR"]
    return Placement(rank, size, local_rank, local_size, machine, machines, launcher, address, port)


def _mpi(
    environment: Environment, launcher: str, names: tuple[str, ...], in_blocks: str, hosts: Hostnames
) -> Placement:
    _, size, _, local_size = _numbers(environment, launcher, names)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if size == local_size:
        address = address or LOOPBACK
    elif address is None and (nodes := environment.get("SLURM_JOB_NODELIST")):
        address = _first(hosts, nodes)
    job = next((environment[name] for name in IDS_OF_MPI if environment.get(name)), None)
    if port is None and (job is not None or size == 1):
        port = _port(zlib.crc32((job or "").encode()))
    found = {"MASTER_ADDR": address or "", "MASTER_PORT": port or ""}
    if missing := [name for name, value in found.items() if not value]:
        flag = "-x" if launcher == OPENMPI else "-genv"
        wanted = " ".join(f"{flag} {name}={'$(hostname)' if 'ADDR' in name else 29500}" for name in missing)
        raise _incomplete(launcher, missing, f"add {wanted} to {launcher}")
    return _stated({**environment, **found}, launcher, names, in_blocks)


def _tasks(environment: Environment) -> str | None:
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")


def _slurm(environment: Environment, hosts: Hostnames) -> Placement:
    own = {
        "SLURM_NTASKS": _tasks(environment),
        "SLURM_NNODES": environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES"),
    }
    filled = {**environment, **{name: value for name, value in own.items() if value}}
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES")
    rank, size, local_rank, machines = _numbers(filled, SLURM, names)
    machine = 0 if machines == 1 else _numbers(filled, SLURM, ("SLURM_NODEID",))[0]
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    # Tasks on each machine, from e.g. 8(x2),4.
    entries = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip()) for entry in (layout or "").split(",")]
    counts = [int(match[1]) for match in entries if match for _ in range(int(match[2] or 1))]
    if None in entries or len(counts) != machines or sum(counts) != size:
        if size % machines:
            raise _incomplete(SLURM, ["SLURM_STEP_TASKS_PER_NODE"], "add --ntasks-per-node N to srun")
        counts = [size // machines] * machines
    local_size = counts[machine]
    if rank != sum(counts[:machine]) + local_rank:
        raise _out_of_order(SLURM, rank, local_rank, local_size, "srun --distribution=block")
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if address is None:
        address = LOOPBACK if machines == 1 else _first(hosts, nodes) if nodes else None
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    if port is None and job:
        port = _port(101 * int(job) + int(environment.get("SLURM_STEP_ID") or "0"))
    found = {"SLURM_JOB_NODELIST": address, "SLURM_JOB_ID": port}
    if missing := [name for name, value in found.items() if not value]:
        fix = "set MASTER_ADDR and MASTER_PORT, or start the ranks in a SLURM job"
        raise _incomplete(SLURM, missing, fix)
    [number] = _numbers({"MASTER_PORT": port or ""}, SLURM, ("MASTER_PORT",))
    return Placement(rank, size, local_rank, local_size, machine, machines, SLURM, address or "", number)


def _plain(environment: Environment) -> Placement:
    """torch's variables, set by a script, or by an operator of Kubernetes, which starts one rank in each pod."""
    local = {
        "LOCAL_RANK": environment.get("LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE"),
    }
    if local["LOCAL_RANK"] is None and "KUBERNETES_SERVICE_HOST" in environment:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    _numbers(environment, PLAIN, ("RANK", "WORLD_SIZE"))  # those first: the others follow from them
    filled = {**environment, **{name: value for name, value in local.items() if value}}
    return _stated(filled, PLAIN, OF_TORCHRUN[:4], "torchrun")


# ------------------------------------------------------------------------------------------- reading


def _numbers(environment: Environment, launcher: str, names: tuple[str, ...]) -> list[int]:
    """The values of variables that have to be numbers."""
    missing = [name for name in names if not environment.get(name)]
    if launcher == PLAIN:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        fix = "start the ranks by torchrun, srun, mpirun or deepspeed, which set all of them"
        if launcher == PLAIN:
            fix += f", or start one process without {', '.join(n for n in names if n not in missing)}"
        raise _incomplete(launcher, missing, fix)
    for name in names:
        if not environment[name].isdigit():
            message = f"must be a number; {launcher} started this rank"
            raise ConfigError(Problem(key=name, value=environment[name], message=message, code="launcher"))
    return [int(environment[name]) for name in names]


def _incomplete(launcher: str, missing: list[str], fix: str) -> ConfigError:
    names = ", ".join(missing)
    message = f"{launcher} started this process as a rank, but does not say which: {names} missing"
    if launcher == PLAIN:
        message = f"RANK is set as for a rank, and {names} {'is' if len(missing) == 1 else 'are'} not"
    return ConfigError(Problem(key="the environment", message=message, fix=fix, code="launcher"))


def _out_of_order(launcher: str, rank: int, local_rank: int, local_size: int, use: str) -> ConfigError:
    message = (
        f"{launcher} gave this machine's rank {local_rank} of {local_size} the number {rank}: "
        "the ranks of a machine must be numbered one after the other, as many on each machine"
    )
    return ConfigError(Problem(key="the environment", message=message, fix=f"use {use}", code="launcher"))


def _port(number: int) -> str:
    return str(PORTS.start + number % len(PORTS))


def _first(hosts: Hostnames, nodes: str) -> str | None:
    return next(iter(hosts(nodes)), None) if set(nodes) & set("[,") else nodes


def _scontrol_hostnames(nodes: str) -> list[str]:
    """The names in a list of SLURM's, by SLURM's own command; none where it is not installed."""
    if shutil.which("scontrol") is None:
        return []
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    return done.stdout.split()
