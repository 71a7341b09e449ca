"""Which rank of another launcher this process is, from its environment alone. Loads no torch.

The most specific launcher is tried first: ``mpirun`` inside a SLURM job has SLURM's variables too, and torchrun inside
``srun`` both.
"""

from __future__ import annotations

import os
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

TORCHRUN, DEEPSPEED, OPENMPI, SLURM = "torchrun", "deepspeed", "mpirun", "srun"
PLAIN = "the environment"
# Rank and ranks, among all and on this machine; machine and machines.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# Source: ``main`` in deepspeed 0.19.8's ``launcher/launch.py``.
OF_DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
OF_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OF_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES")
LOOPBACK = "127.0.0.1"
PORTS = range(12_000, 32_000)  # below the ephemeral ones
RESERVED_STEPS = 4_294_967_280  # of salloc's interactive step, a batch script ... Source: slurm/slurm.h
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
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")
    step = environment.get("SLURM_STEP_ID", str(RESERVED_STEPS) if "SLURM_TASK_PID" in environment else "0")
    in_step = "SLURM_PROCID" in environment and tasks != "1"
    in_step = in_step and not (step.isdigit() and int(step) >= RESERVED_STEPS)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _stated(environment, TORCHRUN, OF_TORCHRUN)
    if "RANK" in environment and "CROSS_SIZE" in environment:
        return _stated(environment, DEEPSPEED, OF_DEEPSPEED)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _openmpi(environment, hosts)
    if in_step and not (interactive and "SLURM_PTY_PORT" in environment):
        return _slurm({**environment, "SLURM_NTASKS": tasks or ""}, hosts)
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


def _openmpi(environment: Environment, hosts: Hostnames) -> Placement:
    _, size, _, local_size = _numbers(environment, OPENMPI, OF_OPENMPI)
    nodes = None if size == local_size else environment.get("SLURM_JOB_NODELIST", "")
    job = next((environment[name] for name in IDS_OF_MPI if environment.get(name)), "" if size == 1 else None)
    number = None if job is None else zlib.crc32(job.encode())
    found, missing = _meeting_point(environment, nodes, number, hosts)
    if missing:
        wanted = " ".join(f"-x {name}={'$(hostname)' if 'ADDR' in name else 29500}" for name in missing)
        raise _incomplete(OPENMPI, missing, f"add {wanted} to mpirun")
    return _stated(found, OPENMPI, OF_OPENMPI, "mpirun --map-by slot")


def _slurm(environment: Environment, hosts: Hostnames) -> Placement:
    machines = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    filled = {**environment, "SLURM_NNODES": machines}
    rank, size, local_rank, num_machines = _numbers(filled, SLURM, OF_SLURM)
    machine = 0 if num_machines == 1 else _numbers(filled, SLURM, ("SLURM_NODEID",))[0]
    local_size = size // num_machines
    if size % num_machines or rank != machine * local_size + local_rank:
        use = "srun --ntasks-per-node N --distribution=block"
        raise _out_of_order(SLURM, rank, local_rank, local_size, use)
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    number = 101 * int(job) + int(environment.get("SLURM_STEP_ID") or "0") if job else None
    found, missing = _meeting_point(environment, None if num_machines == 1 else nodes, number, hosts)
    if missing:
        raise _incomplete(SLURM, missing, "set them, or start the ranks in a SLURM job")
    numbers = (rank, size, local_rank, local_size, machine, num_machines)
    return _stated({**found, **dict(zip(OF_TORCHRUN, map(str, numbers), strict=True))}, SLURM, OF_TORCHRUN)


def _meeting_point(
    environment: Environment, nodes: str | None, job: int | None, hosts: Hostnames
) -> tuple[dict[str, str], list[str]]:
    """An environment with the address and the port where ranks meet, and which of them is not known.

    Args:
        environment: Whatever it states goes first.
        nodes: A list of SLURM's machines, whose first has rank 0; None: this machine has all ranks.
        job: A number that only the ranks of one run have in common.
        hosts: Expands such a list.
    """
    address = LOOPBACK if nodes is None else nodes
    if set(address) & set("[,"):
        address = next(iter(hosts(address)), "")
    port = "" if job is None else str(PORTS.start + job % len(PORTS))
    found = {"MASTER_ADDR": address, "MASTER_PORT": port}
    found = {name: environment.get(name) or value for name, value in found.items()}
    return {**environment, **found}, [name for name, value in found.items() if not value]


def _plain(environment: Environment) -> Placement:
    """torch's variables, set by a script, or by an operator of Kubernetes, which starts one rank in each pod."""
    local = {name: environment.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    local["LOCAL_WORLD_SIZE"] = local["LOCAL_WORLD_SIZE"] or environment.get("LOCAL_SIZE")
    if local["LOCAL_RANK"] is None and "KUBERNETES_SERVICE_HOST" in environment:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    filled = {**environment, **{name: value for name, value in local.items() if value}}
    # Those first: the others follow from them.
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environment.get(name)]:
        raise _incomplete(PLAIN, missing, "set them, or start one process without RANK")
    return _stated(filled, PLAIN, OF_TORCHRUN[:4], "torchrun")


# ------------------------------------------------------------------------------------------- reading


def _numbers(environment: Environment, launcher: str, names: tuple[str, ...]) -> list[int]:
    """The values of variables that have to be numbers."""
    if missing := [name for name in names if not environment.get(name)]:
        fix = "start the ranks by torchrun, srun, mpirun or deepspeed, which set all of them"
        raise _incomplete(launcher, missing, fix)
    for name in names:
        if not environment[name].isdigit():
            message = f"must be a number; {launcher} started this rank"
            raise ConfigError(Problem(key=name, value=environment[name], message=message, code="launcher"))
    return [int(environment[name]) for name in names]


def _incomplete(launcher: str, missing: list[str], fix: str) -> ConfigError:
    who = "RANK" if launcher == PLAIN else launcher
    message = f"{who} makes this process a rank, but does not say which: {', '.join(missing)} missing"
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
