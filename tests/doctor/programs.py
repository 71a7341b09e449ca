"""Programs that answer as the real ones do."""

from __future__ import annotations

import stat
from pathlib import Path

SMI = """\
#!/bin/sh
case "$*" in
  --query-gpu=*) printf '{lines}' ;;
  "") echo "| NVIDIA-SMI {version}             Driver Version: {version}     CUDA Version: {cuda}     |" ;;
esac
"""
NVCC = """\
#!/bin/sh
echo "Cuda compilation tools, release {cuda}, V{cuda}.88"
"""
H100 = "NVIDIA H100 80GB HBM3, 81559, {version}, GPU-{number}a5c2f1e-0000-0000-0000-000000000000\\n"


def program(folder: Path, name: str, text: str) -> None:
    """A script that can be run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def nvidia_smi(folder: Path, *, version: str = "550.54.15", cuda: str = "12.4") -> None:
    """``nvidia-smi`` of a machine with two H100."""
    lines = "".join(H100.format(version=version, number=number) for number in range(2))
    program(folder, "nvidia-smi", SMI.format(lines=lines, version=version, cuda=cuda))


def nvcc(home: Path, cuda: str) -> None:
    """A CUDA toolkit."""
    program(home / "bin", "nvcc", NVCC.format(cuda=cuda))
