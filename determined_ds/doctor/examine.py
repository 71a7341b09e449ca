"""What this machine, or this task's container, can run: everything that ``det-ds doctor`` looks at."""

from __future__ import annotations

import configparser
import json
import os
import platform
import shutil
import sys
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
    ops_of,
)
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import read_document, resolve_stated
from determined_ds.experiment.experiment import parse_experiment, variables_for
from determined_ds.memory.units import GIB, MIB, format_bytes
from determined_ds.report.numbers import count
from determined_ds.rundir.limits import SHARED_MEMORY, num_cores, room_in
from determined_ds.rundir.run_dir import existing
from determined_ds.train.group.addresses import interface_to

OK = "ok"
WARNING = "warning"  # it runs, perhaps not well or not for long
MISSING = "missing"  # it does not run
UNKNOWN = "unknown"  # it cannot be found out here

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than 8 MiB each, ranks end at once.
SHARED_EACH, SHARED_LEAST = 64 * MIB, 8 * MIB
FEW_BYTES, LEAST_BYTES = 10 * GIB, GIB  # at least logs, metrics and a checkpoint of the smallest model
# An unused address, of a block for documentation (RFC 5737): a route to it is the default route.
ANYWHERE = "192.0.2.1"
# Keys of checkpoint_storage that are shown: none of these is a secret.
PLACES = ("bucket", "container", "prefix", "endpoint_url", "account_url", "host_path", "container_path")
MARK = "determined-ds-doctor "
# What an interpreter says of the packages that train; each by itself, so that a broken one hides no other.
IMPORTS = f"""
import importlib, json, os
said = os.dup(1)
os.dup2(2, 1)
found = {{}}
for name in ("torch", "deepspeed", "determined"):
    try:
        module = importlib.import_module(name)
        found[name] = {{}}
    except BaseException as error:
        found[name] = dict(error=f"{{type(error).__name__}}: {{error}}")
    if name == "torch" and not found[name]:
        cuda, hip = module.version.cuda or "", getattr(module.version, "hip", None) or ""
        found[name] = dict(cuda=cuda, hip=hip)
        try:
            module.cuda.init()
            native = bool(hip) or module.cuda.get_device_capability(0) >= (8, 0)
            found[name] |= dict(gpus=module.cuda.device_count(), native_bf16=native)
        except Exception as error:
            found[name]["blind"] = str(error)
os.write(said, ({MARK!r} + json.dumps(found)).encode())
os._exit(0)
"""
STORAGE = """
import json, os, sys
from determined.common import constants, storage
config = json.load(sys.stdin)
mount = constants.SHARED_FS_CONTAINER_PATH
storage.validate_config(config, mount if config["type"] == "shared_fs" and os.path.ismount(mount) else None)
"""


class Diagnosis(NamedTuple):
    """One thing that was checked.

    Args:
        name: Stable, for programs, e.g. ``nvcc``.
        state: ``ok``, ``warning``, ``missing`` or ``unknown``.
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
    """torch, as a rank would find it; ``blind`` says why it sees no GPU, ``error`` why it is not imported."""

    cuda: str = ""
    hip: str = ""
    gpus: int = 0
    native_bf16: bool = False
    blind: str = ""
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
    torch, imported = _imports(environment, context_dir)
    num_gpus, gpus = check_gpus(environment, torch)
    seen = torch.gpus or (num_gpus if torch.error else 0)  # where torch is broken, the driver says
    device = Accelerator(name="cpu", num_devices=num_cores(), bf16=False, fp16=False)
    if accelerator == "cuda" or (accelerator is None and seen):
        device = Accelerator(
            name="cuda", num_devices=seen, bf16=torch.native_bf16 or bool(torch.error), fp16=True
        )
    elif accelerator == "cpu" and gpus.state == MISSING:  # a fault of the GPUs does not matter then
        gpus = gpus._replace(state=WARNING)
    slots, workers, storage = 1, 0, None
    uses: dict[str, list[str]] = {CXX: [], NINJA: [], NVCC: []}  # of what builds, and why
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
            for tool in op.tools:
                uses[tool].append(f"{op.name} ({'.'.join(map(str, op.key))})")
        if resolved and resolved.torch_compile:
            uses[CXX].append("torch.compile (hyperparameters.torch_compile)")
        packages = missing_packages(resolved.ds if resolved else None, point)
        workers, storage = _workers(point.data), document.get(("checkpoint_storage",))
        merged = {**environment, **variables_for(document, kind_of_device(device))}
        environment = {name: value for name, value in merged.items() if value is not None}

    found = [*_versions(), *imported, gpus]
    kind = "GPUs" if device.name == "cuda" else "CPU cores, four ranks on each at most"
    state = OK if slots <= device.max_ranks else WARNING if in_task else MISSING
    fix = f"det-ds run --slots {device.max_ranks}, or several machines"
    if in_task:  # other machines of the experiment have the rest
        fix = "for this task alone: det cmd run --config resources.slots=N"
    elif not device.max_ranks:
        fix = "use --accelerator cpu"
    found.append(Diagnosis("slots", state, f"{device.num_devices} {kind}", count(slots, "slot"), fix))
    for tool in () if torch.hip else uses:  # ROCm has another compiler
        version, wrong = find_tool(tool, environment, torch.cuda)
        needed, state = ", ".join(uses[tool]), OK
        if wrong and needed:
            state = MISSING
        elif wrong and tool == NVCC and device.name == "cuda":
            state, needed = WARNING, "what is compiled for GPUs: ZeRO++, NVMe"
        elif wrong:
            wrong += "; nothing here needs it"
        found.append(Diagnosis(tool, state, wrong or version, needed, how_to_install(tool)))
    for problem in packages:
        needed = problem.message.partition(",")[0].removeprefix("needs ")
        found.append(Diagnosis(f"package for {problem.key}", MISSING, "not installed", needed, problem.fix))
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
    """What is installed, against what determined-ds requires: by its metadata, in a task by setup.cfg."""
    yield Diagnosis("python", OK, platform.python_version())  # pip refuses one that is too old
    try:
        lines = [line for line in metadata.requires("determined-ds") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser()
        setup.read(Path(determined_ds.__file__).parents[1] / "setup.cfg")
        lines = setup.get("options", "install_requires", fallback="").splitlines()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        requirement = Requirement(line)
        name, found = requirement.name, _installed(requirement.name)
        needed = str(requirement.specifier)
        fix = f"pip install '{name}{needed}'"
        if name in ("torch", "determined"):
            fix += ", or on a cluster another environment.image: docker build -f docker/Dockerfile ."
        # NVIDIA's images have a torch that calls itself 2.6.0a0+...: it sorts below 2.6, and has nearly all of it.
        fits = found is not None and requirement.specifier.contains(Version(found).base_version)
        yield Diagnosis(name, OK if fits else MISSING, found or "not installed", needed, fix)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _imports(environment: Mapping[str, str], context_dir: Path) -> tuple[Torch, list[Diagnosis]]:
    """Import what trains, in a process of its own: a finding for what does not import.

    Source: a rank starts as ``python -m`` in the context directory, so that a folder there comes before a package.
    """
    said, wrong = ask([sys.executable, "-c", IMPORTS], environment, cwd=context_dir, timeout_s=180)
    if wrong:  # it has crashed, as of a library that does not fit
        fix = f"run {sys.executable} -c 'import torch, deepspeed', and install anew what does not import"
        return Torch(error=wrong), [Diagnosis("torch import", MISSING, wrong, "that it imports", fix)]
    found: dict[str, dict[str, Any]] = json.loads(said.partition(MARK)[2])
    torch, findings = Torch(**found["torch"]), []
    for name, seen in found.items():
        if "error" in seen and _installed(name) is not None:  # else its version says that it is missing
            fix = f"install {name} anew, as built for this Python and this machine"
            first = seen["error"].strip().splitlines()[0][:300]
            findings.append(Diagnosis(f"{name} import", MISSING, first, "that it imports", fix))
    if not any("error" in seen for seen in found.values()):
        built = f"CUDA {torch.cuda}" if torch.cuda else torch.hip or "CPUs"
        findings = [Diagnosis("imports", OK, f"torch for {built}, deepspeed, determined")]
    return torch, findings


def check_gpus(environment: Mapping[str, str], torch: Torch) -> tuple[int, Diagnosis]:
    """How many GPUs the driver has, and whether torch sees them; torch says itself where the driver is too old."""
    if shutil.which("nvidia-smi", path=environment.get("PATH", "")) is None:
        seen = f"{torch.gpus} that torch sees" if torch.gpus else "none; training is on the CPU"
        return 0, Diagnosis("gpus", OK, seen)
    query = "--query-gpu=name,memory.total,driver_version"
    said, wrong = ask(["nvidia-smi", query, "--format=csv,noheader"], environment)
    if wrong:
        fix = "install the driver anew, or load its kernel module (a restart after an update of it)"
        return 0, Diagnosis("gpus", MISSING, f"nvidia-smi: {wrong}", "a driver", fix)
    kinds = Counter(said.splitlines())
    gpus = kinds.total()
    found = (
        "; ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "none; training is on the CPU"
    )
    hidden = f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', '')}"
    state, fix = OK, ""
    if gpus and not torch.gpus and not torch.error:
        state, fix = MISSING, f"check {hidden}, and that the driver runs CUDA {torch.cuda}"
        found += f", and torch sees none of them: {torch.blind}"
        if not torch.cuda:
            fix = "install a torch that is built for CUDA: pip install --force-reinstall torch from PyPI has one"
            found = f"{found.partition(', and torch')[0]}, and torch is built for CPUs"
    elif torch.gpus and torch.gpus != gpus:
        found += f", of which torch sees {torch.gpus} by {hidden}"
    return gpus, Diagnosis("gpus", state, found, "", fix)


def _network(environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The interface to the other machines, and whether the variables name existing ones."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(environment.get("DET_MASTER", "")).hostname or ""
    peer = environment.get("MASTER_ADDR") or master or ANYWHERE
    route, to = interface_to(peer), "other machines" if peer == ANYWHERE else peer
    said = f"{route} reaches {to}" if route else f"no route to {to}"
    needed = "for several machines, an interface that reaches the others; one machine needs none"
    fix = "for several machines: host networking, or a network of them"
    state = OK if route else WARNING
    yield Diagnosis("network", state, f"{said}; interfaces: {', '.join(up)}", "" if route else needed, fix)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "^")
        if not value.startswith("^"):  # all but these. Source: NCCL's documentation of the variable
            names = tuple(value.lstrip("=").split(","))
            state = OK if any(each.startswith(names) for each in up) else MISSING
            fix = f"unset {variable}, or name one of {', '.join(up)}"
            yield Diagnosis(variable, state, value, "an interface of this machine that is up", fix)


def _room(ranks: int, workers: int, run_dir: Path) -> Iterator[Diagnosis]:
    """Room in shared memory, and on the disk of the run directory."""

    def enough(folder: Path, wanted: int, least: int) -> str:
        free = shutil.disk_usage(folder).free if folder.exists() and os.access(folder, os.W_OK) else 0
        return OK if free >= wanted else WARNING if free >= least else MISSING

    processes = ranks * (1 + workers)
    needed = (
        f"{format_bytes(SHARED_EACH * processes)} for {count(ranks, 'rank')} of {count(workers, 'worker')}"
    )
    state = enough(SHARED_MEMORY, SHARED_EACH * processes, SHARED_LEAST * processes)
    fix = "docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
    said = f"{room_in(SHARED_MEMORY)} in {SHARED_MEMORY}" if SHARED_MEMORY.exists() else f"no {SHARED_MEMORY}"
    yield Diagnosis("shared memory", state, said, needed, fix)
    there = existing(run_dir)
    fix = "free some, name another --run-dir that you may write to, or keep fewer checkpoints by fit.save_total_limit"
    needed = "room for checkpoints: 12 to 16 bytes a parameter each"
    yield Diagnosis(
        "disk", enough(there, FEW_BYTES, LEAST_BYTES), f"{room_in(there)} in {there}", needed, fix
    )


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
    words, once = (
        [sys.executable, "-c", STORAGE],
        {"AWS_MAX_ATTEMPTS": "1", **environment},
    )  # a run tries longer
    _, wrong = ask(words, once, cwd=context_dir, stdin=json.dumps(dict(config)), timeout_s=60)
    said = f"{place}: {wrong or 'a small object was written, read, deleted'}"
    fix = "check that the bucket, container or folder exists, and that you may write, read and delete there"
    needed = "that a small object can be written, read and deleted"
    return Diagnosis("storage", MISSING if wrong else OK, said, needed, fix)
