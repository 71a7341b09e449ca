"""Everything that ``det-ds doctor`` looks at, on this machine or in this task's container."""

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
from determined_ds.devices import GPU_NODES, kind_of_device
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import read_document, resolve_stated
from determined_ds.experiment.experiment import parse_experiment, variables_for
from determined_ds.extensions import CXX, INSTALL, NINJA, NVCC, ask, find_tool, ops_of
from determined_ds.memory.units import GIB, MIB, format_bytes
from determined_ds.report.numbers import count
from determined_ds.rundir.limits import SHARED_MEMORY, num_cores, room_in
from determined_ds.rundir.run_dir import existing
from determined_ds.train.group.addresses import interface_to

OK = "ok"
WARNING = "warning"  # it runs, perhaps not well or not for long; or it is known only elsewhere
MISSING = "missing"  # it does not run

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than 8 MiB a rank, ranks end at once.
SHARED_EACH, SHARED_LEAST = 128 * MIB, 8 * MIB
DISK, DISK_LEAST = 10 * GIB, GIB  # at least logs, metrics and a checkpoint of the smallest model
ANYWHERE = "192.0.2.1"  # of a block for documentation (RFC 5737): a route to it is the default route
# Keys of checkpoint_storage that are shown: none of these is a secret.
PLACES = ("bucket", "container", "prefix", "endpoint_url", "account_url", "host_path", "container_path")
MARK = "determined-ds-doctor "
# What an interpreter says of the packages that train; each by itself, so that a broken one hides no other.
IMPORTS = f"""
import importlib, json, os
said = os.dup(1)
os.dup2(2, 1)
found = dict(errors={{}}, cuda="", hip="", gpus=[], native_bf16=False, blind="")
for name in ("torch", "deepspeed", "determined"):
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        found["errors"][name] = f"{{type(error).__name__}}: {{error}}"
        continue
    if name == "torch":
        found |= dict(cuda=module.version.cuda or "", hip=getattr(module.version, "hip", None) or "")
        try:
            module.cuda.init()
            native = bool(found["hip"]) or module.cuda.get_device_capability(0) >= (8, 0)
            gpus = [module.cuda.get_device_name(index) for index in range(module.cuda.device_count())]
            found |= dict(gpus=gpus, native_bf16=native)
        except Exception as error:
            found["blind"] = str(error)
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
    """One thing that was checked: what there is, what should be, and what to do where something is wrong."""

    name: str
    state: str
    found: str
    needed: str = ""
    fix: str = ""


def examine(
    config: Path | None, context_dir: Path, run_dir: Path, accelerator: str | None = None
) -> Iterator[Diagnosis]:
    """Look at everything, with ``config`` also at what that experiment needs; change nothing.

    Raises:
        ConfigError: the configuration runs nowhere; every reason.
    """
    environment: Mapping[str, str] = dict(os.environ)
    in_task = bool(environment.get("DET_MASTER") and environment.get("DET_TASK_ID"))
    # A rank starts as `python -m` in the context directory, so that a folder there comes before a package.
    said, crashed = ask([sys.executable, "-c", IMPORTS], environment, cwd=context_dir, timeout_s=180)
    torch: dict[str, Any] = {
        "errors": {"torch": crashed},
        "gpus": 0,
        "native_bf16": True,
        "cuda": "",
        "hip": "",
    }
    if not crashed:
        torch |= json.loads(said.partition(MARK)[2])
    on_cuda = accelerator == "cuda" or (accelerator is None and len(torch["gpus"]) > 0)
    device = Accelerator(name="cpu", num_devices=num_cores(), bf16=False, fp16=False)
    if on_cuda:
        device = Accelerator(
            name="cuda", num_devices=len(torch["gpus"]), bf16=torch["native_bf16"], fp16=True
        )
    slots, storage, packages = 1, None, []
    uses: dict[str, list[str]] = {CXX: [], NINJA: [], NVCC: []}  # of what builds, and why
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
        packages = missing_packages(point)
        storage = document.get(("checkpoint_storage",))
        merged = {**environment, **variables_for(document, kind_of_device(device))}
        environment = {name: value for name, value in merged.items() if value is not None}

    installed = list(_versions())
    yield from installed
    absent = {each.name for each in installed if each.found == "not installed"}
    for name, error in torch["errors"].items():
        if name not in absent:
            fix = f"reinstall {name} as built for this Python and this machine"
            yield Diagnosis(
                f"{name} import", MISSING, error.strip().splitlines()[0][:300], "that it imports", fix
            )
    kinds = [f"{number} x {name}" for name, number in Counter(torch["gpus"]).items()]
    found, state, fix = "; ".join(kinds) or "none; training is on the CPU", OK, ""
    has_driver = shutil.which("nvidia-smi", path=environment.get("PATH", "")) is not None
    if "torch" not in torch["errors"] and not kinds and (has_driver or any(map(os.path.exists, GPU_NODES))):
        state = WARNING if accelerator == "cpu" else MISSING
        hidden = f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', '')}"
        found, fix = f"torch sees none: {torch['blind']}", f"check the driver (nvidia-smi), and {hidden}"
        if not torch["cuda"] + torch["hip"]:
            found, fix = (
                "torch is built for CPUs",
                "pip install --force-reinstall torch, which PyPI has for CUDA",
            )
    yield Diagnosis("gpus", state, found, "a GPU, as this machine has a driver", fix)
    kind = "GPUs" if on_cuda else "CPU cores, four ranks on each at most"
    state = OK if slots <= device.max_ranks else WARNING if in_task else MISSING
    # In a task, other machines of the experiment may have the rest.
    fix = f"det-ds run --slots {device.max_ranks}, several machines, or --accelerator cpu"
    yield Diagnosis("slots", state, f"{device.num_devices} {kind}", count(slots, "slot"), fix)
    for tool in () if torch["hip"] else uses:  # ROCm has another compiler
        version, wrong = find_tool(tool, environment, torch["cuda"])
        needed = ", ".join(uses[tool]) or "what is compiled for GPUs: ZeRO++, NVMe" * (tool == NVCC)
        state = MISSING if uses[tool] else WARNING if tool == NVCC and on_cuda else OK
        wrong += "; nothing here needs it" * (state == OK and wrong != "")
        yield Diagnosis(tool, state if wrong else OK, wrong or version, needed, INSTALL[tool])
    for problem in packages:
        needed = problem.message.partition(",")[0].removeprefix("needs ")
        yield Diagnosis(f"package for {problem.key}", MISSING, "not installed", needed, problem.fix)
    yield _network(environment)

    def room(name: str, folder: Path, enough: int, least: int, needed: str, fix: str) -> Diagnosis:
        is_there = folder.exists() and os.access(folder, os.W_OK)
        free = shutil.disk_usage(folder).free if is_there else 0
        state = OK if free >= enough else WARNING if free >= least else MISSING
        found = f"{room_in(folder)} in {folder}" if is_there else f"{folder} cannot be written to"
        return Diagnosis(name, state, found, needed, fix)

    ranks = min(slots, device.max_ranks)
    needed = (
        f"{format_bytes(SHARED_EACH * ranks)} for {count(ranks, 'rank')} and the workers of their loaders"
    )
    fix = "docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
    yield room("shared memory", SHARED_MEMORY, SHARED_EACH * ranks, SHARED_LEAST * ranks, needed, fix)
    needed = "room for checkpoints: 12 to 16 bytes a parameter each"
    fix = "free some, name another --run-dir that you may write to, or keep fewer checkpoints by fit.save_total_limit"
    yield room("disk", existing(run_dir), DISK, DISK_LEAST, needed, fix)
    if isinstance(storage, dict) and storage.get("type"):
        yield _storage(storage, environment, context_dir, in_task=in_task)


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
        name, needed = requirement.name, str(requirement.specifier)
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        fix = f"pip install '{name}{needed}'"
        if name in ("torch", "determined"):
            fix += ", or on a cluster another environment.image: docker build -f docker/Dockerfile ."
        # NVIDIA's images have a torch that calls itself 2.6.0a0+...: it sorts below 2.6, and has nearly all of it.
        fits = found != "not installed" and requirement.specifier.contains(Version(found).base_version)
        yield Diagnosis(name, OK if fits else MISSING, found, needed, fix)


def _network(environment: Mapping[str, str]) -> Diagnosis:
    """The interface to the other machines."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(environment.get("DET_MASTER", "")).hostname or ""
    peer = environment.get("MASTER_ADDR") or master or ANYWHERE
    route, to = interface_to(peer), "other machines" if peer == ANYWHERE else peer
    found = f"{f'{route} reaches' if route else 'no route to'} {to}; interfaces: {', '.join(up)}"
    needed = "for several machines, an interface that reaches the others; one machine needs none"
    fix = "for several machines: host networking, or a network of them"
    return Diagnosis("network", OK if route else WARNING, found, needed, fix)


def _storage(
    config: Mapping[str, Any], environment: Mapping[str, str], context_dir: Path, *, in_task: bool
) -> Diagnosis:
    """Write, read and delete an object through Determined's own storage manager, in a process that can be ended."""
    kind, state = str(config["type"]), OK
    found = f"{kind}: {', '.join(f'{key} {config[key]}' for key in PLACES if config.get(key))}"
    folder = config.get("container_path" if kind == "directory" else "host_path")
    needed = "that a small object can be written, read and deleted"
    fix = "check that the bucket, container or folder exists, and that you may write, read and delete there"
    if kind in ("shared_fs", "directory") and not in_task and not (folder and Path(str(folder)).is_dir()):
        state, found = WARNING, f"{found} is not on this machine"
        needed, fix = "a folder of the agents' machines", "run the doctor in a task: det cmd run"
    else:
        words = [sys.executable, "-c", STORAGE]
        once = {"AWS_MAX_ATTEMPTS": "1", **environment}  # a run tries longer
        _, wrong = ask(words, once, cwd=context_dir, stdin=json.dumps(dict(config)), timeout_s=60)
        state = MISSING if wrong else OK
        found += f": {wrong or 'a small object was written, read, deleted'}"
    return Diagnosis("storage", state, found, needed, fix)
