"""Programs that answer as the real ones do."""

from __future__ import annotations

from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 470.57.02"


def program(path: Path, line: str) -> None:
    """A program that prints a line, twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\n")
    path.chmod(0o755)


def nvcc(home: Path, cuda: str) -> None:
    """A CUDA toolkit."""
    program(home / "bin/nvcc", f"Cuda compilation tools, release {cuda}, V{cuda}.88")
