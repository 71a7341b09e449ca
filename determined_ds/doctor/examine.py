"""What this machine, or this task's container, can run: everything that ``det-ds doctor`` looks at."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from determined_ds.check.trial import check_entrypoint
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import Where, missing_packages
from determined_ds.devices import kind_of_device
from determined_ds.doctor.extensions import (
    CXX,
    LIBAIO,
    NINJA,
    NVCC,
    ask,
    find_tool,
    how_to_install,
    is_prebuilt,
    locks_left,
    ops_of,
    root_of_extensions,
)
from determined_ds.doctor.installed import (
    MISSING,
    OK,
    UNKNOWN,
    WARNING,
    Diagnosis,
    check_gpus,
    check_imports,
    check_versions,
)
from determined_ds.experiment.decide import decide_stated, read_document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.variables import variables_for
from determined_ds.memory.units import GIB, MIB, format_bytes
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.limits import SHARED_MEMORY, num_cores, room_in
from determined_ds.rundir.run_dir import existing
from determined_ds.train.group.addresses import interface_to

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than 8 MiB each, ranks end at once.
SHARED_EACH, SHARED_LEAST = 64 * MIB, 8 * MIB
FEW_BYTES, LEAST_BYTES = 10 * GIB, GIB  # at least logs, metrics and a checkpoint of the smallest model
STORAGE_S = 60.0
# An unused address, of a block for documentation (RFC 5737): a route to it is the default route.
ANYWHERE = "192.0.2.1"
# Keys of checkpoint_storage that are shown: none of these is a secret.
PLACES = (
    "bucket",
    "container",
    "prefix",
    "endpoint_url",
    "account_url",
    "host_path",
    "storage_path",
    "container_path",
)
STORAGE_FIXES = {
    "s3": "check that bucket and endpoint_url are right and reachable from here (a proxy, a firewall), and that the "
    "credentials may put, get, list and delete objects",
    "gcs": "check that the bucket exists, and that GOOGLE_APPLICATION_CREDENTIALS names an account that may use it",
    "azure": "check that the container exists, and connection_string or account_url with credential",
}


def examine(
    config: Path | None, context_dir: Path, run_dir: Path, accelerator: str | None = None
) -> list[Diagnosis]:
    """Look at everything; change nothing.

    Args:
        config: The experiment that it is to run; None to look at the machine alone.
        context_dir: The folder with the code, where ranks start.
        run_dir: Of the run; it need not exist.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.

    Raises:
        ConfigError: the configuration runs nowhere; every reason.
    """
    environment: Mapping[str, str] = dict(os.environ)
    in_task = bool(environment.get("DET_MASTER") and environment.get("DET_TASK_ID"))
    torch, imported = check_imports(environment, context_dir)
    num_gpus, gpus = check_gpus(environment, torch)
    seen = torch.gpus or (num_gpus if torch.error else 0)  # where torch is broken, the driver says
    device = Accelerator(name="cpu", num_devices=num_cores(), bf16=False, fp16=False)
    if accelerator == "cuda" or (accelerator is None and seen):
        bf16 = torch.native_bf16 or bool(torch.error)
        device = Accelerator(name="cuda", num_devices=seen, bf16=bf16, fp16=True)
    slots, workers, storage = 1, 0, None
    tools: dict[str, list[str]] = {}  # of what is built, and why
    packages = []
    if config is not None:
        document = read_document(config, context_dir, command="doctor")
        experiment = parse_experiment(document)
        check_entrypoint(experiment, context_dir)
        slots, point = experiment.slots, experiment.hyperparameters
        enough = replace(device, num_devices=max(device.num_devices, slots))
        resolved = decide_stated(experiment, point, Where(context_dir=context_dir, accelerator=enough))
        for op in ops_of(resolved) if resolved else ():
            for tool in () if NVCC in op.tools and is_prebuilt(op.name) else op.tools:
                tools.setdefault(tool, []).append(f"{op.name} ({'.'.join(map(str, op.key))})")
        if resolved and resolved.torch_compile:
            tools.setdefault(CXX, []).append("torch.compile (hyperparameters.torch_compile)")
        packages = missing_packages(resolved.ds if resolved else None, point)
        workers = _workers(point.data)
        storage = document.get(("checkpoint_storage",))
        merged = {**environment, **variables_for(document, kind_of_device(device)).values}
        environment = {name: value for name, value in merged.items() if value is not None}
        _, gpus = check_gpus(environment, torch)

    found = [*check_versions(context_dir), *imported]
    if accelerator == "cpu":  # a fault of the GPUs does not matter then
        gpus = [each._replace(state=WARNING) if each.state == MISSING else each for each in gpus]
    found += gpus

    kind = "GPUs" if device.name == "cuda" else "CPU cores, four ranks on each at most"
    state = OK if slots <= device.max_ranks else WARNING if in_task else MISSING
    fix = f"det-ds run --slots {device.max_ranks}, or several machines"
    if in_task:  # other machines of the experiment have the rest
        fix = "for this task alone: det cmd run --config resources.slots=N"
    elif not device.max_ranks:
        fix = "use --accelerator cpu"
    found.append(Diagnosis("slots", state, f"{device.num_devices} {kind}", count(slots, "slot"), fix))

    if kind_of_device(device) != "rocm" and not torch.hip:  # which has another compiler
        for tool in (CXX, NINJA, NVCC, *([LIBAIO] if LIBAIO in tools else [])):
            version, wrong = find_tool(tool, environment, torch.cuda)
            uses = ", ".join(tools.get(tool, ()))
            idle = not uses and not (tool == NVCC and device.name == "cuda")
            state = OK if not wrong or idle else MISSING if uses else WARNING
            said = f"{wrong}; nothing here needs it" if wrong and idle else wrong or version
            needed = uses or ("what is compiled for GPUs: ZeRO++, NVMe" if wrong and not idle else "")
            found.append(Diagnosis(tool, state, said, needed, how_to_install(tool, torch.cuda)))
    for problem in packages:
        needed = problem.message.partition(",")[0].removeprefix("needs ")
        found.append(Diagnosis(f"package for {problem.key}", MISSING, "not installed", needed, problem.fix))

    root = root_of_extensions(environment)
    locks = locks_left(root, now=time.time())
    if not locks:
        found.append(Diagnosis("extension locks", OK, f"no abandoned lock in {root}"))
    needed = "no lock of a build that was killed: the next build of that extension would wait forever"
    for lock in locks:
        state, who = MISSING, "if no other process builds it, "
        if lock.is_stale:
            state, who = WARNING, "det-ds run and the start-up hook remove it; or "
        said = f"{lock.path}: {lock.why}"
        found.append(Diagnosis("extension locks", state, said, needed, f"{who}rm {lock.path}"))

    found += _network(environment)
    found += _limits(min(slots, device.max_ranks), workers, run_dir)
    if isinstance(storage, dict) and storage.get("type"):
        found.append(_storage(storage, environment, context_dir, in_task=in_task))
    return [each._replace(fix="") if each.state == OK else each for each in found]


def _workers(node: Any) -> int:
    """The first ``num_workers`` at any depth: a hyperparameter of the models here, and a usual one elsewhere."""
    if not isinstance(node, dict):
        return 0
    own = node.get("num_workers")
    return own if isinstance(own, int) else next(filter(None, map(_workers, node.values())), 0)


def _network(environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The interface to the other machines, and whether the variables name existing ones."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(environment.get("DET_MASTER", "")).hostname or ""
    peer = environment.get("MASTER_ADDR") or master or ANYWHERE
    to = "other machines" if peer == ANYWHERE else peer
    route = interface_to(peer)
    if route is not None:
        yield Diagnosis("network", OK, f"{route} reaches {to}; interfaces: {', '.join(up)}")
    else:
        others = ", ".join(name for name in up if name != "lo") or "none but the loopback"
        needed = "for several machines, an interface that reaches the others; one machine needs none"
        fix = "for several machines: host networking, or a network of them"
        state = WARNING if peer in (ANYWHERE, master) else OK
        yield Diagnosis("network", state, f"no route to {to}; interfaces: {others}", needed, fix)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable)
        if value is None:
            continue
        chosen = [value] if value in up else []
        if variable.startswith("NCCL"):
            # Prefixes; exact names after =; all but those after ^. Source: NCCL's documentation of the variable.
            names, exact = value.lstrip("^=").split(","), "=" in value[:2]
            named = [each for each in up if each in names or (not exact and each.startswith(tuple(names)))]
            chosen = [each for each in up if each not in named] if value.startswith("^") else named
        needed, fix = (
            "an interface of this machine that is up",
            f"unset {variable}, or name one of {', '.join(up)}",
        )
        said = f"{value}: {', '.join(chosen)}" if chosen else value
        yield Diagnosis(variable, OK if chosen else MISSING, said, needed, fix)


def _limits(ranks: int, workers: int, run_dir: Path) -> Iterator[Diagnosis]:
    """Room in shared memory, and on the disk of the run directory."""

    def enough(number: int, wanted: int, least: int) -> str:
        return OK if number >= wanted else WARNING if number >= least else MISSING

    processes = ranks * (1 + workers)
    needed = (
        f"{format_bytes(SHARED_EACH * processes)} for {count(ranks, 'rank')} of {count(workers, 'worker')}"
    )
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        said = f"{SHARED_MEMORY}: {error.strerror}"
        yield Diagnosis("shared memory", MISSING, said, needed, "mount a tmpfs there")
    else:
        state = enough(free, SHARED_EACH * processes, SHARED_LEAST * processes)
        fix = "docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
        yield Diagnosis("shared memory", state, f"{room_in(SHARED_MEMORY)} in {SHARED_MEMORY}", needed, fix)

    there = existing(run_dir)
    state = enough(shutil.disk_usage(there).free, FEW_BYTES, LEAST_BYTES)
    fix = "free some, name another --run-dir, or keep fewer checkpoints by fit.save_total_limit"
    needed = "room for checkpoints: 12 to 16 bytes a parameter each"
    said = f"{room_in(there)} in {there}"
    if not os.access(there, os.W_OK):
        state, said = MISSING, f"{there} cannot be written to"
        fix = "name another --run-dir, or have its owner let this user write there"
    yield Diagnosis("disk", state, said, needed, fix)


def _storage(
    config: Mapping[str, Any], environment: Mapping[str, str], context_dir: Path, *, in_task: bool
) -> Diagnosis:
    """Write, read and delete an object through Determined's own storage manager, in a process that can be ended."""
    kind = str(config["type"])
    place = f"{kind}: {', '.join(f'{key} {config[key]}' for key in PLACES if config.get(key))}"
    folder = config.get("container_path" if kind == "directory" else "host_path")
    if kind in ("shared_fs", "directory") and not in_task and not (folder and Path(str(folder)).is_dir()):
        needed = "a folder of the agents' machines; `det cmd run` checks it there"
        return Diagnosis("storage", UNKNOWN, f"{place} is not on this machine", needed)
    once = {"AWS_MAX_ATTEMPTS": "1", **environment}  # a run tries longer
    words = [sys.executable, "-m", "determined_ds.doctor.probe"]
    _, wrong = ask(words, once, cwd=context_dir, stdin=json.dumps(dict(config)), timeout_s=STORAGE_S)
    said = f"{place}: {wrong or 'a small object was written, read, deleted'}"
    fix = STORAGE_FIXES.get(
        kind, "check that the folder exists, is mounted, and may be written to by this user"
    )
    needed = "that a small object can be written, read and deleted"
    return Diagnosis("storage", MISSING if wrong else OK, said, needed, fix)
