"""GPUs as the driver, torch and the variables of this process name them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from determined_ds.doctor.diagnosis import MISSING, OK, UNKNOWN, WARNING, Diagnosis, diagnosis
from determined_ds.doctor.imports import Torch
from determined_ds.doctor.surroundings import Host
from determined_ds.memory.units import format_bytes

QUERY = "name,memory.total,driver_version,uuid"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "none; training is on the CPU"
# The first driver that runs what is built for a CUDA.
# Source: table 1 of NVIDIA's CUDA Compatibility, "Minor Version Compatibility".
FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What ``nvidia-smi`` says.

    Args:
        gpus: Of each its name, its memory in bytes and its UUID.
        version: The driver's; "" where it is not known.
        cuda: The newest CUDA that it runs; () where it is not known.
        error: Why it says nothing; "" where it does.
    """

    gpus: tuple[tuple[str, int, str], ...] = ()
    version: str = ""
    cuda: tuple[int, ...] = ()
    error: str = ""


def ask_driver(host: Host) -> Driver | None:
    """What the NVIDIA driver knows; None where there is no ``nvidia-smi``."""
    if host.which("nvidia-smi") is None:
        return None
    answer = host.ask(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    if not answer.worked:
        return Driver(error=answer.last_line)
    gpus, version = [], ""
    for line in answer.said.splitlines():
        name, mebibytes, version, uuid = ([part.strip() for part in line.split(",")] + [""] * 4)[:4]
        gpus.append((name, int(mebibytes) * 2**20 if mebibytes.isdigit() else 0, uuid))
    header = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", host.ask(["nvidia-smi"]).said)
    cuda = tuple(map(int, header.groups())) if header else ()
    return Driver(gpus=tuple(gpus), version=version, cuda=cuda)


def check_gpus(host: Host, driver: Driver | None, torch: Torch) -> Iterator[Diagnosis]:
    """How many GPUs there are and torch sees, and whether the driver runs torch's CUDA."""
    if driver is None:
        seen = f"{torch.gpus} that torch sees, without nvidia-smi" if torch.gpus else NO_GPU
        yield Diagnosis("gpus", OK, seen)
    elif driver.error:
        fix = "install the driver anew, or load its kernel module (a restart after an update of it)"
        yield Diagnosis("gpus", MISSING, f"nvidia-smi: {driver.error}", "a driver", fix)
    else:
        yield _count(driver, torch)
    if driver is not None and driver.gpus:
        yield _driver(driver, torch)
    if VISIBLE in host.environment:
        yield _visible(host.variable(VISIBLE), driver)


def _count(driver: Driver, torch: Torch) -> Diagnosis:
    names = Counter(f"{name}, {format_bytes(size)}" if size else name for name, size, _ in driver.gpus)
    found = "; ".join(f"{count} x {words}" for words, count in names.items()) or NO_GPU
    if torch.error or not driver.gpus or torch.gpus:
        seen = f", of which torch sees {torch.gpus}" if torch.gpus and torch.gpus != len(driver.gpus) else ""
        return Diagnosis("gpus", OK, f"{found}{seen}")
    if not torch.cuda:
        fix = "install a torch that is built for CUDA: pip install --force-reinstall torch from PyPI has one"
        return Diagnosis("gpus", MISSING, f"{found}, and torch is built for CPUs", fix=fix)
    fix = f"check {VISIBLE}, and the driver below"
    return Diagnosis("gpus", MISSING, f"{found}, and torch sees none of them", fix=fix)


def _driver(driver: Driver, torch: Torch) -> Diagnosis:
    found = f"{driver.version}, for CUDA up to {'.'.join(map(str, driver.cuda)) or '?'}"
    if not torch.cuda:
        return Diagnosis("driver", OK, found)
    needed = f"CUDA {torch.cuda}, which torch is built for"
    built = tuple(map(int, torch.cuda.split(".")[:2]))
    first = FIRST_DRIVERS.get(built[0])
    newer = f"install driver {first} or newer" if first else "install a newer driver"
    if not driver.cuda:
        return Diagnosis("driver", UNKNOWN, found, needed)
    if driver.cuda[0] < built[0]:
        fix = f"{newer}, or a torch that is built for CUDA {driver.cuda[0]}"
        return Diagnosis("driver", MISSING, found, needed, fix)
    fix = f"if a kernel fails to load, install a driver for CUDA {torch.cuda}"
    return diagnosis("driver", WARNING if driver.cuda < built else OK, found, needed, fix)


def _visible(value: str, driver: Driver | None) -> Diagnosis:
    """Source: CUDA shows a process one MIG device (NVIDIA's MIG user guide, "CUDA Visible Devices")."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    there = [uuid for _, _, uuid in driver.gpus] if driver is not None else []
    absent = [name for name in names if there and not _names_device(name, there)]
    state, needed, fix = OK, "", ""
    if len(names) > 1 and any(name.startswith("MIG") for name in names):
        state, needed = MISSING, "one MIG device: a process sees no more of them"
        fix = f"name one, and train on one slot: {VISIBLE}={names[0]}"
    elif absent:
        state, needed = MISSING, "names of existing devices"
        fix = f"name devices of nvidia-smi -L, or 0 to {len(there) - 1}; not {', '.join(absent)}"
    elif there and not names:
        state, needed, fix = WARNING, "the GPUs that are to train", f"unset {VISIBLE} to train on the GPUs"
    return Diagnosis(VISIBLE, state, value or "empty: no device", needed, fix)


def _names_device(name: str, uuids: list[str]) -> bool:
    """By its number, or by the beginning of its UUID. ``nvidia-smi`` does not list MIG devices here."""
    if name.isdigit():
        return int(name) < len(uuids)
    return name.startswith("MIG") or any(uuid.startswith(name) for uuid in uuids)
