"""What this machine computes on. Looks before it imports torch, so that a CPU machine answers at once."""

from __future__ import annotations

import os
from pathlib import Path

from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import ConfigError, Problem

NAMES = ("cpu", "cuda")
# Device nodes of the NVIDIA driver, of WSL's, and of ROCm's (which torch calls cuda too).
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def detect_accelerator(name: str | None = None) -> Accelerator:
    """The accelerator to train on: CUDA where there is any, else the CPU; or the one that is named.

    Args:
        name: ``cpu``, ``cuda`` or None for the best there is.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    origin = "--accelerator" if name else "the environment's DS_ACCELERATOR"
    name = name or os.environ.get("DS_ACCELERATOR") or None
    if name not in (None, *NAMES):
        raise _refuse(name, origin, "no such accelerator", "use cpu or cuda")
    if name != "cpu" and any(Path(node).exists() for node in GPU_NODES):
        found = _cuda()
        if found is not None:
            return found
    if name == "cuda":
        mend = "use --accelerator cpu, or a machine with a GPU"
        raise _refuse(name, origin, "torch finds no CUDA device here", mend)
    flags = _cpu_flags()
    return Accelerator(
        name="cpu",
        num_devices=_num_cores(),
        bf16=False,
        fp16=bool(flags & {"avx512_fp16", "amx_fp16"}),
    )


def _refuse(name: str | None, origin: str, message: str, mend: str) -> ConfigError:
    problem = Problem(
        key="accelerator", value=name, origin=origin, message=message, mend=mend, code="accelerator"
    )
    return ConfigError(problem)


def _cuda() -> Accelerator | None:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return None
    # bf16 arithmetic came with compute capability 8.0; older cards only emulate it.
    native = torch.version.hip is not None or torch.cuda.get_device_capability(0) >= (8, 0)
    return Accelerator(name="cuda", num_devices=count, bf16=native, fp16=True)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())
