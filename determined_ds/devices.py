"""What this machine computes on. torch is imported only where there may be a GPU, so a CPU machine answers at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.limits import num_cores

# Device nodes of the NVIDIA driver, of WSL's, and of ROCm's (which torch calls cuda too).
ROCM_NODE = "/dev/kfd"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", ROCM_NODE)


def detect_accelerator(name: str | None = None) -> Accelerator:
    """The accelerator to train on: CUDA where there is any, else the CPU; or the one that is named.

    Args:
        name: ``cpu``, ``cuda`` or None for the best there is.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    origin = "--accelerator" if name else "the environment's DS_ACCELERATOR"
    name = name or os.environ.get("DS_ACCELERATOR") or None
    message, fix = "must be cpu or cuda", "use cpu or cuda"
    if name in (None, "cuda") and any(Path(node).exists() for node in GPU_NODES):
        found = _cuda()
        if found is not None:
            return found
    if name == "cuda":
        message, fix = "torch finds no CUDA device here", "use --accelerator cpu, or a machine with a GPU"
    if name not in (None, "cpu"):
        key = code = "accelerator"
        raise ConfigError(Problem(key=key, value=name, origin=origin, message=message, fix=fix, code=code))
    fp16 = bool(cpu_flags() & {"avx512_fp16", "amx_fp16"})
    return Accelerator(name="cpu", num_devices=num_cores(), bf16=False, fp16=fp16)


def detect_without_torch(name: str | None = None) -> Accelerator | None:
    """The same without importing torch, for the start-up hook; None where only torch knows.

    Args:
        name: As for :func:`detect_accelerator`.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    named = name or os.environ.get("DS_ACCELERATOR")
    if named == "cpu" or not any(Path(node).exists() for node in GPU_NODES):
        return detect_accelerator(name)
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # nvidia-smi lists them all
        return None
    ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        native = [float(capability) >= 8.0 for capability in said.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):  # ROCm, an old driver
        return None
    if len(set(native)) != 1:  # none, or of several kinds
        return None
    return Accelerator(name="cuda", num_devices=len(native), bf16=native[0], fp16=True)


def kind_of_device(accelerator: Accelerator) -> str:
    """Determined's name: ``cpu``, ``cuda`` or ``rocm``; torch calls the last ``cuda``."""
    is_rocm = accelerator.name == "cuda" and Path(ROCM_NODE).exists() and not Path(GPU_NODES[0]).exists()
    return "rocm" if is_rocm else accelerator.name


def _cuda() -> Accelerator | None:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return None
    # bf16 arithmetic came with compute capability 8.0; older cards only emulate it.
    native = torch.version.hip is not None or torch.cuda.get_device_capability(0) >= (8, 0)
    return Accelerator(name="cuda", num_devices=count, bf16=native, fp16=True)


def threads_per_rank(ranks: int) -> int:
    """``OMP_NUM_THREADS`` of each rank, unless it is set: ranks that share a machine's cores divide them.

    Args:
        ranks: On this machine.
    """
    return max(1, num_cores() // ranks)


def cpu_flags() -> set[str]:
    """What the processor says that it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())
