"""Programs that answer as the real ones do, and machines that have them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from determined_ds.doctor.surroundings import Host

SMI = """\
#!/bin/sh
case "$*" in
  --query-gpu=*) {query} ;;
  "") cat <<END
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {version}             Driver Version: {version}     CUDA Version: {cuda}     |
+-----------------------------------------------------------------------------------------+
END
esac
"""
NVCC = """\
#!/bin/sh
cat <<END
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release {cuda}, V{cuda}.88
Build cuda_{cuda}.r{cuda}/compiler.36424714_0
END
"""
H100 = "NVIDIA H100 80GB HBM3, 81559, {version}, GPU-{number}a5c2f1e-0000-0000-0000-000000000000"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)


def program(folder: Path, name: str, text: str) -> Path:
    """A script that can be run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def nvidia_smi(folder: Path, *, gpus: int = 2, version: str = "550.54.15", cuda: str = "12.4") -> None:
    """``nvidia-smi`` of a machine with so many H100; with -1, of one whose driver is not loaded."""
    lines = "\\n".join(H100.format(version=version, number=number) for number in range(gpus))
    query = f"echo {NO_DRIVER!r}; exit 9" if gpus < 0 else f"printf '{lines}\\n'"
    program(folder, "nvidia-smi", SMI.format(query=query, version=version, cuda=cuda))


def nvcc(home: Path, cuda: str) -> None:
    """A CUDA toolkit."""
    program(home / "bin", "nvcc", NVCC.format(cuda=cuda))


def machine(*folders: Path, cuda: Path = Path("/nowhere"), **environment: str) -> Host:
    """A machine whose programs are those of some folders; with none of them, those of this one."""
    path = os.pathsep.join(map(str, folders)) if folders else os.environ["PATH"]
    return Host(environment={"PATH": path, **environment}, cuda=cuda)


def as_if_installed(folder: Path, name: str, version: str) -> None:
    """The account of a distribution, found before the one that is really there."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
