"""What is installed: versions, what imports, GPUs and their driver. torch is loaded by a child process alone."""

from __future__ import annotations

import configparser
import json
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

import determined_ds
from determined_ds.doctor.extensions import ask
from determined_ds.memory.units import format_bytes

OK = "ok"
WARNING = "warning"  # it runs, perhaps not well or not for long
MISSING = "missing"  # it does not run
UNKNOWN = "unknown"  # it cannot be found out here
STATES = (OK, WARNING, MISSING, UNKNOWN)

ROOT = Path(determined_ds.__file__).parents[1]
IMPORTED = ("torch", "deepspeed", "determined")
IMPORT_S = 180.0
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
VISIBLE = "CUDA_VISIBLE_DEVICES"
# The first driver that runs what is built for a CUDA.
# Source: table 1 of NVIDIA's CUDA Compatibility, "Minor Version Compatibility".
FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}


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


def check_versions(context_dir: Path) -> Iterator[Diagnosis]:
    """What is installed, against what determined-ds and its models require.

    The requirements are those of ``setup.cfg`` in the context directory or beside the package, else of the installed
    package's metadata.
    """
    yield Diagnosis("python", OK, platform.python_version())  # pip refuses one that is too old
    required: list[tuple[str, bool]] = []  # whether it is optional
    setup = configparser.ConfigParser()
    folder = next((each for each in (context_dir, ROOT) if _reads_ours(each / "setup.cfg", setup)), None)
    if folder is not None:
        required += [(line, False) for line in setup["options"]["install_requires"].splitlines()]
        models = setup.get("options.extras_require", "models", fallback="")
        required += [(line, True) for line in models.splitlines()]
    else:
        try:
            lines = metadata.requires("determined-ds") or []
        except metadata.PackageNotFoundError:
            yield Diagnosis("packages", UNKNOWN, "no metadata of determined-ds, no setup.cfg")
            return
        for line in lines:
            marker = Requirement(line).marker
            if marker is None or marker.evaluate({"extra": "models"}):
                required.append((line, marker is not None))
    constraints = f" -c {folder / 'constraints.txt'}" if folder is not None else ""
    for line, optional in required:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        name, found = requirement.name, installed_version(requirement.name)
        needed = f"{requirement.specifier}{', for the models of this repository' if optional else ''}"
        fix = f"pip install '{name}{requirement.specifier}'{constraints}"
        if name in ("torch", "determined"):
            fix += ", or on a cluster another environment.image: docker build -f docker/Dockerfile ."
        state = WARNING if optional else MISSING
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            state = OK
        elif (
            found is not None
            and name == "torch"
            and requirement.specifier.contains(Version(found).base_version)
        ):
            # NVIDIA's images have a torch that calls itself 2.6.0a0+...: it sorts below 2.6, and has nearly all of it.
            state, fix = WARNING, f"if it fails: {fix}"
            found = f"{found}, built from before {Version(found).base_version} was finished"
        yield Diagnosis(name, state, found or "not installed", needed, fix)


def _reads_ours(file: Path, setup: configparser.ConfigParser) -> bool:
    setup.clear()
    setup.read(file)
    return setup.get("metadata", "name", fallback="") == "determined-ds"


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
    if "error" in found["torch"]:
        return Torch(error=found["torch"]["error"]), findings
    torch = Torch(**found["torch"])
    if not findings:
        built = f"torch for CUDA {torch.cuda}" if torch.cuda else f"torch for {torch.hip or 'CPUs'}"
        findings = [Diagnosis("imports", OK, f"{built}, {', '.join(IMPORTED[1:])}")]
    return torch, findings


def check_gpus(environment: Mapping[str, str], torch: Torch) -> tuple[int, list[Diagnosis]]:
    """Whether torch sees the GPUs that the driver has, and the driver runs torch's CUDA.

    Returns:
        How many GPUs the driver has, and the findings.
    """
    if shutil.which("nvidia-smi", path=environment.get("PATH", "")) is None:
        seen = (
            f"{torch.gpus} that torch sees, without nvidia-smi"
            if torch.gpus
            else "none; training is on the CPU"
        )
        return 0, [Diagnosis("gpus", OK, seen)]
    query = "--query-gpu=name,memory.total,driver_version"
    said, wrong = ask(["nvidia-smi", query, "--format=csv,noheader,nounits"], environment)
    if wrong:
        fix = "install the driver anew, or load its kernel module (a restart after an update of it)"
        return 0, [Diagnosis("gpus", MISSING, f"nvidia-smi: {wrong}", "a driver", fix)]
    gpus = [([part.strip() for part in line.split(",")] + [""] * 3)[:3] for line in said.splitlines()]
    kinds = Counter(
        f"{name}, {format_bytes(int(size) * 2**20)}" if size.isdigit() else name for name, size, _ in gpus
    )
    found = "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none; training is on the CPU"
    state, fix = OK, ""
    hidden = f"={environment[VISIBLE]}" if VISIBLE in environment else ""
    if gpus and not torch.gpus and not torch.error:
        state, found = MISSING, f"{found}, and torch sees none of them"
        fix = f"check {VISIBLE}{hidden}, and the driver below"
        if not torch.cuda:
            found = found.replace("sees none of them", "is built for CPUs")
            fix = "install a torch that is built for CUDA: pip install --force-reinstall torch from PyPI has one"
    elif torch.gpus and torch.gpus != len(gpus):
        found += f", of which torch sees {torch.gpus}{f' by {VISIBLE}{hidden}' if hidden else ''}"
    findings = [Diagnosis("gpus", state, found, "", fix)]
    if gpus:
        header = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", ask(["nvidia-smi"], environment)[0])
        runs = tuple(map(int, header.groups())) if header else ()
        found = f"{gpus[0][2]}, for CUDA up to {'.'.join(map(str, runs)) or '?'}"
        state, needed = OK, f"CUDA {torch.cuda}, which torch is built for" if torch.cuda else ""
        built = tuple(map(int, torch.cuda.split(".")[:2])) if torch.cuda else ()
        fix = f"if a kernel fails to load, install a driver for CUDA {torch.cuda}"
        if built and not runs:
            state, fix = UNKNOWN, ""
        elif built and runs[0] < built[0]:
            first = FIRST_DRIVERS.get(built[0])
            newer = f"install driver {first} or newer" if first else "install a newer driver"
            state, fix = MISSING, f"{newer}, or a torch that is built for CUDA {runs[0]}"
        elif runs < built:
            state = WARNING
        findings.append(Diagnosis("driver", state, found, needed, fix))
    return len(gpus), findings
