"""What an export costs, beside a plain copy of the bytes that it writes, on the same disk.

    make bench

Each in turns with the copy: read, written, put on the disk and renamed. The checkpoint is verified before that; how
long that takes stands by itself, beside the same copy.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from determined_ds.export.exporting import export
from determined_ds.export.verified_engine import verify
from determined_ds.export.wanted import ExportRequest
from determined_ds.protocol.checkpoint_files import sync_to_disk
from tests.checkpoint.making import made

TENSORS, ELEMENTS = 32, 2**22  # 512 MiB of weights
TURNS = 5
FORMS = {"safetensors": None, "torch": None, "safetensors, --dtype bf16": "bf16"}


def measure(folder: Path) -> dict[str, list[float]]:
    """Form -> its speed by that of the copy, of each turn; of "verify" likewise."""
    values = np.random.default_rng(1).standard_normal(ELEMENTS, dtype="<f4")
    path = made(
        folder / "uuid", {f"layer{number}": {"weight": ("F32", values)} for number in range(TENSORS)}, ranks=2
    )
    found: dict[str, list[float]] = {"verify": []}
    for _ in range(TURNS):
        copying = _copied(path, folder / "copy")
        found["verify"].append(copying / _seconds(lambda: verify(path, lambda count: None)))
        for form, dtype in FORMS.items():
            out = folder / "out"
            request = ExportRequest(path=path, to=form.partition(",")[0], out=out, dtype=dtype)
            with mock.patch("determined_ds.export.exporting.verify"):
                took = _seconds(partial(export, request))
            found.setdefault(form, []).append(_copied(out, folder / "copy") / took)
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    return found


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _copied(source: Path, target: Path) -> float:
    """Seconds to copy a file or a folder and put the copy on the disk."""

    def copy() -> None:
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            target.mkdir()
            shutil.copyfile(source, target / source.name)
        sync_to_disk(target)

    took = _seconds(copy)
    shutil.rmtree(target)
    return took


def table() -> str:
    """Measure, and return the table."""
    # Beside this file, since an export goes to a disk and a temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = measure(Path(folder).resolve())
    rows = ["| | speed, by that of the copy | lowest |", "|---|---|---|"]
    rows += [f"| {form} | {statistics.median(each):.2f} | {min(each):.2f} |" for form, each in found.items()]
    size = TENSORS * ELEMENTS * 4 / 1e6
    return "\n".join([*rows, "", f"{size:,.0f} MB of fp32 weights in {TENSORS} tensors, cut by two ranks."])
