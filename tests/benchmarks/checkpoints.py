"""What a checkpoint costs, beside a plain copy of the same bytes on the same disk.

    make bench

Written: serialized, checksummed, put on the disk and renamed. Read: verified and loaded. Each in turns with the copy.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

WIDTH = 3072
TURNS = 5


def measure(folder: str) -> dict[str, list[float]]:
    """In a rank: seconds of each thing, a figure a turn, and the bytes of a checkpoint."""
    import torch

    from determined_ds import open_context
    from determined_ds.protocol.checkpoint_files import checkpoints_in
    from determined_ds.runtime.checkpoints.saving import Checkpoints
    from determined_ds.runtime.checkpoints.trial_state import TrialState
    from tests.benchmarks.parts import Saved

    hparams = {
        "global_batch_size": 8,
        "width": WIDTH,
        "deepspeed_config": {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("write", "read", "copy", "bytes")}
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        trial = Saved(context)
        trial.train_batch(
            iter(trial.training_loader(trial.data)), 0, 0
        )  # Adam's state comes with its first step
        checkpoints = Checkpoints(trial, context, {}, {}, total_limit=1)
        state = TrialState()
        for _ in range(TURNS):
            state.batches_trained += 1
            seconds["write"].append(_timed(lambda: checkpoints.save(state), context))
            seconds["read"].append(_timed(lambda: checkpoints.load(state.kept[-1], trial_id=0), context))
            if torch.distributed.get_rank() == 0:
                path = checkpoints_in(Path(folder) / "checkpoints")[0].path
                seconds["bytes"].append(
                    float(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
                )
                seconds["copy"].append(_copy(path, Path(folder) / "copy"))
            context.distributed.allgather(None)
    return seconds


def _timed(action: Any, context: Any) -> float:
    context.distributed.allgather(None)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _copy(source: Path, target: Path) -> float:
    """Seconds to copy a folder and put the copy on the disk."""
    started = time.perf_counter()
    shutil.copytree(source, target)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def table() -> str:
    """Measure, and return the table."""
    # Beside this file, since a checkpoint goes to a disk and a temporary folder may be memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ranks = Ranks(2, Path(folder) / "logs")
        found = ranks.run(measure, str(Path(folder).resolve() / "run"))[0]
    size = statistics.median(found["bytes"])
    rows = ["| | MB/s | against the copy |", "|---|---|---|"]
    for name in ("copy", "write", "read"):
        ratios = [a / b for a, b in zip(found[name], found["copy"], strict=True)]
        rate = size / statistics.median(found[name]) / 1e6
        rows.append(f"| {name} | {rate:,.0f} | {statistics.median(ratios):.2f} x its time |")
    return "\n".join([*rows, "", f"A checkpoint of {size / 1e6:,.0f} MB, two ranks, ZeRO 1."])
