"""What this machine, or this task's container, can run: everything that ``det-ds doctor`` looks at."""

from __future__ import annotations

import configparser
import json
import os
import platform
import re
import shutil
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

import determined_ds
from determined_ds.check.trial import code_problems
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import Where, missing_packages
from determined_ds.devices import kind_of_device
from determined_ds.doctor.extensions import (
    CXX,
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
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import read_document, resolve_stated
from determined_ds.experiment.experiment import parse_experiment, variables_for
from determined_ds.memory.units import GIB, MIB, format_bytes
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.limits import SHARED_MEMORY, num_cores, room_in
from determined_ds.rundir.run_dir import existing
from determined_ds.train.group.addresses import interface_to

OK = "ok"
WARNING = "warning"  # it runs, perhaps not well or not for long
MISSING = "missing"  # it does not run
UNKNOWN = "unknown"  # it cannot be found out here
STATES = (OK, WARNING, MISSING, UNKNOWN)

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than 8 MiB each, ranks end at once.
SHARED_EACH, SHARED_LEAST = 64 * MIB, 8 * MIB
FEW_BYTES, LEAST_BYTES = 10 * GIB, GIB  # at least logs, metrics and a checkpoint of the smallest model
IMPORT_S, STORAGE_S = 180.0, 60.0
# An unused address, of a block for documentation (RFC 5737): a route to it is the default route.
ANYWHERE = "192.0.2.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# The first driver that runs what is built for a CUDA.
# Source: table 1 of NVIDIA's CUDA Compatibility, "Minor Version Compatibility".
FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
# Keys of checkpoint_storage that are shown: none of these is a secret.
PLACES = ("bucket", "container", "prefix", "endpoint_url", "account_url", "host_path", "container_path")
STORAGE_FIXES = {
    "s3": "check bucket and endpoint_url, and that the credentials may put, get, list and delete objects",
    "gcs": "check that the bucket exists, and that GOOGLE_APPLICATION_CREDENTIALS names an account that may use it",
    "azure": "check that the container exists, and connection_string or account_url with credential",
}
IMPORTED = ("torch", "deepspeed", "determined")
MARK = "determined-ds-doctor "
# What an interpreter says of the packages that train; each by itself, so that a broken one hides no other.
PROGRAM = f"""
import importlib, json, os
said = os.dup(1)
os.dup2(2, 1)
found = {{}}
for name in {IMPORTED!r}:
    try:
        module = importlib.import_module(name)
        found[name] = {{}}
        if name == "torch":
            gpus, hip = module.cuda.device_count(), getattr(module.version, "hip", None) or ""
            native = bool(hip) or gpus > 0 and module.cuda.get_device_capability(0) >= (8, 0)
            found[name] = dict(cuda=module.version.cuda or "", hip=hip, gpus=gpus, native_bf16=native)
    except BaseException as error:
        found[name] = {{"error": f"{{type(error).__name__}}: {{error}}"}}
os.write(said, ({MARK!r} + json.dumps(found)).encode())
os._exit(0)
"""


class Diagnosis(NamedTuple):
    """One thing that was checked.

    Args:
        name: Stable, for programs, e.g. ``nvcc``.
        state: One of :data:`STATES`.
        found: What there is.
        needed: What there should be, and for what; "" where nothing is needed.
        fix: What to do; it counts only where something is wrong.
    """

    name: str
    state: str
    found: str
    needed: str = ""
    fix: str = ""


class Torch(NamedTuple):
    """torch, as a rank would find it: the CUDA or ROCm it is built for, the devices that it sees, why it fails."""

    cuda: str = ""
    hip: str = ""
    gpus: int = 0
    native_bf16: bool = False
    error: str = ""


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
        document = read_document(config, context_dir, trains=False)
        experiment = parse_experiment(document)
        if problems := code_problems(experiment, context_dir):
            raise ConfigError(problems)
        slots, point = experiment.slots, experiment.hyperparameters
        enough = replace(device, num_devices=max(device.num_devices, slots))
        resolved = resolve_stated(experiment, point, Where(context_dir=context_dir, accelerator=enough))
        for op in ops_of(resolved) if resolved else ():
            for tool in () if NVCC in op.tools and is_prebuilt(op.name) else op.tools:
                tools.setdefault(tool, []).append(f"{op.name} ({'.'.join(map(str, op.key))})")
        if resolved and resolved.torch_compile:
            tools.setdefault(CXX, []).append("torch.compile (hyperparameters.torch_compile)")
        packages = missing_packages(resolved.ds if resolved else None, point)
        workers = _workers(point.data)
        storage = document.get(("checkpoint_storage",))
        merged = {**environment, **variables_for(document, kind_of_device(device))}
        environment = {name: value for name, value in merged.items() if value is not None}
        _, gpus = check_gpus(environment, torch)

    found = [*_versions(), *imported]
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

    for tool in () if torch.hip else (CXX, NINJA, NVCC):  # ROCm has another compiler
        version, wrong = find_tool(tool, environment, torch.cuda)
        uses = ", ".join(tools.get(tool, ()))
        state = OK if not wrong else MISSING if uses else WARNING
        needed = uses or ("what is compiled for GPUs: ZeRO++, NVMe" if wrong else "")
        if wrong and not uses and not (tool == NVCC and device.name == "cuda"):
            state, wrong, needed = OK, f"{wrong}; nothing here needs it", ""
        found.append(Diagnosis(tool, state, wrong or version, needed, how_to_install(tool, torch.cuda)))
    for problem in packages:
        needed = problem.message.partition(",")[0].removeprefix("needs ")
        found.append(Diagnosis(f"package for {problem.key}", MISSING, "not installed", needed, problem.fix))

    root = root_of_extensions(environment)
    locks = locks_left(root, now=time.time())
    if not locks:
        found.append(Diagnosis("extension locks", OK, f"no abandoned lock in {root}"))
    for lock in locks:
        state, who = MISSING, "if no other process builds it, "
        if lock.is_stale:
            state, who = WARNING, "det-ds run and the start-up hook remove it; or "
        needed = "no lock of a build that was killed: the next build of that extension would wait forever"
        said = f"{lock.path}: {lock.why}"
        found.append(Diagnosis("extension locks", state, said, needed, f"{who}rm {lock.path}"))

    found += _network(environment)
    found += _room(min(slots, device.max_ranks), workers, run_dir)
    if isinstance(storage, dict) and storage.get("type"):
        found.append(_storage(storage, environment, context_dir, in_task=in_task))
    return [each._replace(fix="") if each.state == OK else each for each in found]


def _workers(node: Any) -> int:
    """The first ``num_workers`` at any depth: a hyperparameter of the models here, and a usual one elsewhere."""
    if not isinstance(node, dict):
        return 0
    own = node.get("num_workers")
    return own if isinstance(own, int) else next(filter(None, map(_workers, node.values())), 0)


def _versions() -> Iterator[Diagnosis]:
    """What is installed, against what determined-ds and its models require: by ``setup.cfg``, or the metadata."""
    yield Diagnosis("python", OK, platform.python_version())  # pip refuses one that is too old
    root = Path(determined_ds.__file__).parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    constraints = ""
    if setup.get("metadata", "name", fallback="") == "determined-ds":
        own, models = setup["options"]["install_requires"], setup["options.extras_require"]["models"]
        lines = [(line, False) for line in own.splitlines()] + [(line, True) for line in models.splitlines()]
        constraints = f" -c {root / 'constraints.txt'}"
    else:
        try:
            required = metadata.requires("determined-ds") or []
        except metadata.PackageNotFoundError:
            yield Diagnosis("packages", UNKNOWN, "no metadata of determined-ds, no setup.cfg")
            return
        given = [(line, Requirement(line).marker) for line in required]
        lines = [
            (line, marker is not None)
            for line, marker in given
            if marker is None or marker.evaluate({"extra": "models"})
        ]
    for line, optional in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        name, found = requirement.name, installed_version(requirement.name)
        needed = f"{requirement.specifier}{', for the models of this repository' if optional else ''}"
        fix = f"pip install '{name}{requirement.specifier}'{constraints}"
        if name in ("torch", "determined"):
            fix += ", or on a cluster another environment.image: docker build -f docker/Dockerfile ."
        # NVIDIA's images have a torch that calls itself 2.6.0a0+...: it sorts below 2.6, and has nearly all of it.
        fits = found is not None and requirement.specifier.contains(Version(found).base_version)
        state = OK if fits else WARNING if optional else MISSING
        yield Diagnosis(name, state, found or "not installed", needed, fix)


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_imports(environment: Mapping[str, str], context_dir: Path) -> tuple[Torch, list[Diagnosis]]:
    """Import what trains, in a process of its own: a finding for what does not import.

    Source: a rank starts as ``python -m`` in the context directory, so that a folder there comes before a package.
    """
    words = [sys.executable, "-c", PROGRAM]
    said, wrong = ask(words, environment, cwd=context_dir, timeout_s=IMPORT_S)
    if wrong:  # it has crashed, as of a library that does not fit
        fix = f"run {sys.executable} -c 'import torch, deepspeed', and install anew what does not import"
        return Torch(error=wrong), [Diagnosis("torch import", MISSING, wrong, "that it imports", fix)]
    found: dict[str, dict[str, Any]] = json.loads(said.partition(MARK)[2])
    findings = []
    for name, seen in found.items():
        if (
            "error" in seen and installed_version(name) is not None
        ):  # else its version says that it is missing
            fix = f"install {name} anew, as built for this Python and this machine"
            first = seen["error"].strip().splitlines()[0][:300]
            findings.append(Diagnosis(f"{name} import", MISSING, first, "that it imports", fix))
    torch = Torch(**found["torch"])
    if not any("error" in seen for seen in found.values()):
        built = f"torch for CUDA {torch.cuda}" if torch.cuda else f"torch for {torch.hip or 'CPUs'}"
        findings = [Diagnosis("imports", OK, f"{built}, {', '.join(IMPORTED[1:])}")]
    return torch, findings


def check_gpus(environment: Mapping[str, str], torch: Torch) -> tuple[int, list[Diagnosis]]:
    """Whether torch sees the GPUs that the driver has, and the driver runs torch's CUDA.

    Returns:
        How many GPUs the driver has, and the findings.
    """
    if shutil.which("nvidia-smi", path=environment.get("PATH", "")) is None:
        seen = f"{torch.gpus} that torch sees" if torch.gpus else "none; training is on the CPU"
        return 0, [Diagnosis("gpus", OK, seen)]
    query = "--query-gpu=name,memory.total,driver_version"
    said, wrong = ask(["nvidia-smi", query, "--format=csv,noheader"], environment)
    if wrong:
        fix = "install the driver anew, or load its kernel module (a restart after an update of it)"
        return 0, [Diagnosis("gpus", MISSING, f"nvidia-smi: {wrong}", "a driver", fix)]
    gpus = [([part.strip() for part in line.split(",")] + [""] * 3)[:3] for line in said.splitlines()]
    if not gpus:
        return 0, [Diagnosis("gpus", OK, "none; training is on the CPU")]
    kinds = Counter(f"{name}, {size}" for name, size, _ in gpus)
    found = "; ".join(f"{number} x {kind}" for kind, number in kinds.items())
    state, fix = OK, ""
    hidden = f"={environment[VISIBLE]}" if VISIBLE in environment else ""
    if not torch.gpus and not torch.error and not torch.cuda:
        state, found = MISSING, f"{found}, and torch is built for CPUs"
        fix = "install a torch that is built for CUDA: pip install --force-reinstall torch from PyPI has one"
    elif not torch.gpus and not torch.error:
        state, found = MISSING, f"{found}, and torch sees none of them"
        fix = f"check {VISIBLE}{hidden}, and the driver below"
    elif torch.gpus and torch.gpus != len(gpus):
        found += f", of which torch sees {torch.gpus}{f' by {VISIBLE}{hidden}' if hidden else ''}"
    findings = [Diagnosis("gpus", state, found, "", fix)]
    header = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", ask(["nvidia-smi"], environment)[0])
    runs = tuple(map(int, header.groups())) if header else ()
    built = tuple(map(int, torch.cuda.split(".")[:2])) if torch.cuda else ()
    state, needed = OK, f"CUDA {torch.cuda}, which torch is built for" if torch.cuda else ""
    fix = f"if a kernel fails to load, install a driver for CUDA {torch.cuda}"
    if built and not runs:
        state, fix = UNKNOWN, ""
    elif built and runs[0] < built[0]:
        newer = (
            f"driver {FIRST_DRIVERS[built[0]]} or newer" if built[0] in FIRST_DRIVERS else "a newer driver"
        )
        state, fix = MISSING, f"install {newer}, or a torch that is built for CUDA {runs[0]}"
    elif runs < built:
        state = WARNING
    found = f"{gpus[0][2]}, for CUDA up to {'.'.join(map(str, runs)) or '?'}"
    return len(gpus), [*findings, Diagnosis("driver", state, found, needed, fix)]


def _network(environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The interface to the other machines, and whether the variables name existing ones."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(environment.get("DET_MASTER", "")).hostname or ""
    peer = environment.get("MASTER_ADDR") or master or ANYWHERE
    to = "other machines" if peer == ANYWHERE else peer
    route = interface_to(peer)
    interfaces = f"interfaces: {', '.join(up)}"
    if route is not None:
        yield Diagnosis("network", OK, f"{route} reaches {to}; {interfaces}")
    else:
        needed = "for several machines, an interface that reaches the others; one machine needs none"
        fix = "for several machines: host networking, or a network of them"
        state = WARNING if peer in (ANYWHERE, master) else OK
        yield Diagnosis("network", state, f"no route to {to}; {interfaces}", needed, fix)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable)
        if value is None or value.startswith(
            "^"
        ):  # all but these. Source: NCCL's documentation of the variable
            continue
        names = tuple(
            value.lstrip("=").split(",")
        )  # prefixes for NCCL without a =; gloo takes one whole name
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        chosen = [each for each in up if each in names or (is_prefix and each.startswith(names))]
        fix = f"unset {variable}, or name one of {', '.join(up)}"
        needed = "an interface of this machine that is up"
        yield Diagnosis(variable, OK if chosen else MISSING, value, needed, fix)


def _room(ranks: int, workers: int, run_dir: Path) -> Iterator[Diagnosis]:
    """Room in shared memory, and on the disk of the run directory."""

    def enough(folder: Path | str, wanted: int, least: int) -> str:
        free = shutil.disk_usage(folder).free
        return OK if free >= wanted else WARNING if free >= least else MISSING

    processes = ranks * (1 + workers)
    each = f"{count(ranks, 'rank')} of {count(workers, 'worker')}"
    needed = f"{format_bytes(SHARED_EACH * processes)} for {each}"
    try:
        state = enough(SHARED_MEMORY, SHARED_EACH * processes, SHARED_LEAST * processes)
    except OSError as error:
        said = f"{SHARED_MEMORY}: {error.strerror}"
        yield Diagnosis("shared memory", MISSING, said, needed, "mount a tmpfs there")
    else:
        fix = "docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
        yield Diagnosis("shared memory", state, f"{room_in(SHARED_MEMORY)} in {SHARED_MEMORY}", needed, fix)
    there = existing(run_dir)
    state, said = enough(there, FEW_BYTES, LEAST_BYTES), f"{room_in(there)} in {there}"
    fix = "free some, name another --run-dir, or keep fewer checkpoints by fit.save_total_limit"
    if not os.access(there, os.W_OK):
        state, said = MISSING, f"{there} cannot be written to"
    yield Diagnosis("disk", state, said, "room for checkpoints: 12 to 16 bytes a parameter each", fix)


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
    fix = STORAGE_FIXES.get(kind, "check that the folder is mounted, and that this user may write there")
    needed = "that a small object can be written, read and deleted"
    return Diagnosis("storage", MISSING if wrong else OK, said, needed, fix)
