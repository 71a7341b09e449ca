"""Which rank of somebody else's launcher this process is, from its environment alone. Loads no torch.

Each launcher is one function below, the most specific first: ``mpirun`` inside a SLURM job has SLURM's variables too,
and torchrun inside ``srun`` both.
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
from determined_ds.protocol.handed_on import LAUNCHED_BY, PARENT

Environment = Mapping[str, str]
Hostnames = Callable[[str], list[str]]

# Names that the launchers here give to themselves.
TORCHRUN, DEEPSPEED, OPENMPI, HYDRA, SLURM, PLAIN = (
    "torchrun",
    "deepspeed",
    "mpirun",
    "mpiexec",
    "srun",
    "the environment",
)
LOOPBACK = "127.0.0.1"
# Below those that a system gives to whoever connects.
PORTS = range(12_000, 32_000)
# SLURM_INTERACTIVE_STEP and the others that no `srun` of a user's makes. Source: slurm/slurm.h.
RESERVED_STEPS = 4_294_967_280
# By which an MPI knows one run from another on the same machine.
IDS_OF_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMI_JOBID")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of this process among the ranks of a launcher.

    Args:
        rank: From 0.
        size: Ranks in all.
        local_rank: Among those of its machine.
        local_size: Ranks of its machine.
        machine: Number of its machine, from 0.
        machines: How many there are.
        master_addr: Where rank 0 can be reached.
        master_port: A port there; torchrun listens at it already.
        launcher: Its name, for people.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine: int
    machines: int
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: str

    def variables(self) -> dict[str, str]:
        """As torchrun and DeepSpeed's launcher name it, whichever launcher it was."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "LOCAL_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "CROSS_RANK": str(self.machine),
            "CROSS_SIZE": str(self.machines),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def placement_of(
    environment: Environment, *, interactive: bool = False, hostnames: Hostnames | None = None
) -> Placement | None:
    """The place of this process, or None where no launcher started it.

    Args:
        environment: Of the process.
        interactive: Whether its input is a terminal: a shell of ``srun --pty`` has all variables of a task.
        hostnames: Takes a list of SLURM's apart, e.g. ``node[1-3]``; ``scontrol show hostnames`` if None.

    Raises:
        ConfigError: a launcher's variables are not all there; what is missing is named.
    """
    if PARENT in environment or environment.get("DET_TASK_TYPE") == "TRIAL":
        return None  # below a rank of our own launcher, or of a cluster's
    hosts = hostnames or scontrol_hostnames
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun(environment)
    if "RANK" in environment and "CROSS_SIZE" in environment:
        return _deepspeed(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _openmpi(environment, hosts)
    if "PMI_RANK" in environment and ("MPI_LOCALRANKID" in environment or not _in_step(environment)):
        return _hydra(environment, hosts)
    if _in_step(environment) and not (interactive and "SLURM_PTY_PORT" in environment):
        return _slurm(environment, hosts)
    return _plain(environment)


def placement_here() -> Placement | None:
    """The place of this very process; see :func:`placement_of`."""
    pid, _, launcher = os.environ.get(LAUNCHED_BY, "").partition(" ")
    if pid == str(os.getpid()):  # and of no process below it
        return replace(_torchrun(os.environ), launcher=launcher)
    return placement_of(os.environ, interactive=sys.stdin is not None and sys.stdin.isatty())


def _torchrun(environment: Environment) -> Placement:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return _stated(environment, TORCHRUN, names)


def _deepspeed(environment: Environment) -> Placement:
    """Source: ``main`` in deepspeed 0.19.8's ``launcher/launch.py``."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return _stated(environment, DEEPSPEED, names)


def _stated(environment: Environment, launcher: str, names: tuple[str, ...]) -> Placement:
    """The place that a launcher states whole: rank and ranks, among all and on this machine, machine and machines."""
    rank, size, local_rank, local_size, machine, machines = _numbers(environment, launcher, names)
    address, port = _master(environment, launcher)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=machine,
        machines=machines,
        master_addr=address,
        master_port=port,
        launcher=launcher,
    )


def _openmpi(environment: Environment, hosts: Hostnames) -> Placement:
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _of_mpi(environment, OPENMPI, names, "mpirun --map-by slot", hosts)


def _hydra(environment: Environment, hosts: Hostnames) -> Placement:
    """MPICH's and Intel's."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _of_mpi(environment, HYDRA, names, "mpiexec -ppn N", hosts)


def _of_mpi(
    environment: Environment, launcher: str, names: tuple[str, ...], in_blocks: str, hosts: Hostnames
) -> Placement:
    rank, size, local_rank, local_size = _numbers(environment, launcher, names)
    if size % local_size or rank % local_size != local_rank:
        raise _in_order(launcher, rank, local_rank, local_size, in_blocks)
    machines = size // local_size
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if machines == 1:
        address = address or LOOPBACK
    elif address is None and (nodes := environment.get("SLURM_JOB_NODELIST")):
        address = _first(hosts, nodes)
    job = next((environment[name] for name in IDS_OF_MPI if environment.get(name)), None)
    if port is None and (job is not None or size == 1):
        port = str(_port(zlib.crc32((job or "").encode())))
    found = {"MASTER_ADDR": address, "MASTER_PORT": port}
    if missing := [name for name, value in found.items() if not value]:
        flag = "-x" if launcher == OPENMPI else "-genv"
        wanted = " ".join(f"{flag} {name}={'$(hostname)' if 'ADDR' in name else 29500}" for name in missing)
        raise _half(launcher, missing, f"add {wanted} to {launcher}")
    own = {**environment, **{name: value for name, value in found.items() if value}}
    address, number = _master(own, launcher)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=rank // local_size,
        machines=machines,
        master_addr=address,
        master_port=number,
        launcher=launcher,
    )


def _in_step(environment: Environment) -> bool:
    """Whether this is a task of a step of several: not a batch script, nor a shell that SLURM gave.

    A batch script has ``SLURM_PROCID`` and ``SLURM_TASK_PID`` as well, but no step.
    """
    if "SLURM_PROCID" not in environment or _tasks(environment) == "1":
        return False
    step = environment.get("SLURM_STEP_ID")
    if step is None:
        return "SLURM_TASK_PID" not in environment
    return not (step.isdigit() and int(step) >= RESERVED_STEPS)


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
    per_machine = _per_machine(layout, size, machines)
    if per_machine is None:
        raise _half(SLURM, ["SLURM_STEP_TASKS_PER_NODE"], "add --ntasks-per-node N to srun")
    local_size = per_machine[machine]
    if rank != sum(per_machine[:machine]) + local_rank:
        raise _in_order(SLURM, rank, local_rank, local_size, "srun --distribution=block")
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if address is None and machines == 1:
        address = LOOPBACK
    elif address is None and nodes:
        address = _first(hosts, nodes)
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    if port is None and job:
        step = environment.get("SLURM_STEP_ID") or "0"
        port = str(_port(101 * int(job) + int(step)))
    found = {"SLURM_JOB_NODELIST": address, "SLURM_JOB_ID": port}
    if missing := [name for name, value in found.items() if not value]:
        raise _half(SLURM, missing, "set MASTER_ADDR and MASTER_PORT, or start the ranks in a job of SLURM's")
    address, number = _master({"MASTER_ADDR": address or "", "MASTER_PORT": port or ""}, SLURM)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=machine,
        machines=machines,
        master_addr=address,
        master_port=number,
        launcher=SLURM,
    )


def _per_machine(layout: str | None, size: int, machines: int) -> list[int] | None:
    """Tasks on each machine, from e.g. ``8(x2),4``; None where nothing says it."""
    counts: list[int] = []
    for entry in (layout or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            counts = []
            break
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == machines and sum(counts) == size:
        return counts
    return None if size % machines else [size // machines] * machines


def _plain(environment: Environment) -> Placement | None:
    """torch's own variables, set by somebody: a script, or an operator of Kubernetes, which starts one in each pod."""
    if "RANK" not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    rank, size = _numbers(environment, PLAIN, ("RANK", "WORLD_SIZE"))
    address, port = _master(environment, PLAIN)
    local = {
        "LOCAL_RANK": environment.get("LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE"),
    }
    if local["LOCAL_RANK"] is None and "KUBERNETES_SERVICE_HOST" in environment:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    filled = {**environment, **{name: value for name, value in local.items() if value}}
    local_rank, local_size = _numbers(filled, PLAIN, tuple(local))
    if size % local_size or rank % local_size != local_rank:
        raise _in_order(PLAIN, rank, local_rank, local_size, "torchrun")
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        machine=rank // local_size,
        machines=size // local_size,
        master_addr=address,
        master_port=port,
        launcher=PLAIN,
    )


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
        raise _half(launcher, missing, fix)
    found = []
    for name in names:
        if not environment[name].isdigit():
            raise _refuse(name, environment[name], f"not a number, and {launcher} started this rank", "")
        found.append(int(environment[name]))
    return found


def _master(environment: Environment, launcher: str) -> tuple[str, int]:
    [port] = _numbers(environment, launcher, ("MASTER_PORT",))
    if not environment.get("MASTER_ADDR"):
        raise _half(launcher, ["MASTER_ADDR"], "set it to the address of the first machine")
    return environment["MASTER_ADDR"], port


def _half(launcher: str, missing: list[str], fix: str) -> ConfigError:
    message = (
        f"{launcher} started this process as a rank, and does not say which: {', '.join(missing)} missing"
    )
    if launcher == PLAIN:
        message = (
            f"RANK is set as for a rank, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
        )
    return _refuse("the environment", None, message, fix)


def _in_order(launcher: str, rank: int, local_rank: int, local_size: int, use: str) -> ConfigError:
    message = (
        f"{launcher} gave this machine's rank {local_rank} of {local_size} the number {rank}: "
        "the ranks of a machine must be numbered one after the other, as many on each machine"
    )
    return _refuse("the environment", None, message, f"use {use}")


def _refuse(key: str, value: str | None, message: str, fix: str) -> ConfigError:
    if value is None:
        return ConfigError(Problem(key=key, message=message, fix=fix, code="launcher"))
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix, code="launcher"))


def _port(number: int) -> int:
    return PORTS.start + number % len(PORTS)


def _first(hosts: Hostnames, nodes: str) -> str | None:
    if not set(nodes) & set("[,"):
        return nodes
    return next(iter(hosts(nodes)), None)


def scontrol_hostnames(nodes: str) -> list[str]:
    """The names in a list of SLURM's, by SLURM's own command; none where it is not at hand."""
    if shutil.which("scontrol") is None:
        return []
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    return done.stdout.split()
