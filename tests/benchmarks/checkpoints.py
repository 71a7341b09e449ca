"""What a checkpoint costs, beside a plain copy of the same bytes on the same disk and in memory.

    make bench
    python -m tests.benchmarks.checkpoints 9856        # one of 1.5 GB

Written at once: serialized, checksummed, put on the disk and renamed. While training continues: how long it stops for
the copy, and for the seal; how much longer a step takes meanwhile. Read: verified and loaded. Each in turns with the
copy.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

WIDTH = 3072
TURNS = 5
STEPS = 40  # of some milliseconds each, that are timed without a writer


def measure(folder: str, width: int) -> dict[str, list[float]]:
    """In a rank: seconds of each thing, a figure a turn, and the bytes of a checkpoint."""
    import torch

    from determined_ds import open_context
    from determined_ds.protocol.checkpoint_files import checkpoints_in
    from determined_ds.runtime.checkpoints.saving import Checkpoints
    from determined_ds.runtime.checkpoints.trial_state import TrialState
    from tests.benchmarks.parts import Saved

    hparams = {
        "global_batch_size": 8,
        "width": width,
        "deepspeed_config": {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    }
    names = ("write", "read", "copy", "bytes", "stall", "memory copy", "seal", "step", "step meanwhile")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        trial = Saved(context)
        trial.train_batch(
            iter(trial.training_loader(trial.data)), 0, 0
        )  # Adam's state comes with its first step
        checkpoints = Checkpoints(trial, context, {}, {})
        checkpoints.prepare(True)
        own = torch.zeros(2, checkpoints._engines.copy_bytes() // 4)
        state = TrialState()
        for turn in range(TURNS + 2):  # the first two make the buffers
            state.batches_trained += 1
            found = {"write": _timed(lambda: checkpoints.save(state), context)}
            found["read"] = _timed(lambda: checkpoints.load(state.kept[-1], trial_id=0), context)
            found["memory copy"] = _timed(lambda: own[1].copy_(own[0]), context)
            found["step"] = _step_s(lambda number: number < STEPS)
            state.batches_trained += 1
            found["stall"] = _timed(lambda: checkpoints.save(state, waits=False), context)
            found["step meanwhile"] = _step_s(lambda _: not checkpoints.is_written)
            found["seal"] = _timed(checkpoints.finish, context)
            if torch.distributed.get_rank() == 0:
                path = checkpoints_in(Path(folder) / "checkpoints")[0].path
                found["bytes"] = float(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
                found["copy"] = _copy(path, Path(folder) / "copy")
                for earlier in checkpoints_in(path.parent):
                    shutil.rmtree(earlier.path)
            context.distributed.allgather(None)
            for name, value in found.items() if turn > 1 else ():
                seconds[name].append(value)
    return seconds


def _timed(action: Any, context: Any) -> float:
    context.distributed.allgather(None)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _step_s(goes_on: Callable[[int], bool]) -> float:
    """Mean seconds of a computation of some milliseconds on this rank alone, as long as it is wanted."""
    import torch

    inputs = torch.randn(384, 384)
    started, number = time.perf_counter(), 0
    while number == 0 or goes_on(number):
        torch.tanh(inputs @ inputs @ inputs)
        number += 1
    return (time.perf_counter() - started) / number


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


def table(width: int = WIDTH, size: int = 2) -> str:
    """Measure, and return the table."""
    # Where runs go, since a checkpoint goes to a disk and a temporary folder may be memory.
    Path("runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="runs") as folder:
        ranks = Ranks(size, Path(folder) / "logs")
        found = ranks.run(measure, str(Path(folder).resolve() / "run"), width)[0]
    num_bytes = statistics.median(found["bytes"])
    rows = ["| | MB/s | against |", "|---|---|---|"]
    for name, base in (
        ("copy", "copy"),
        ("write", "copy"),
        ("read", "copy"),
        ("memory copy", "memory copy"),
        ("stall", "memory copy"),
        ("seal", "memory copy"),
    ):
        ratios = [a / b for a, b in zip(found[name], found[base], strict=True)]
        rate = num_bytes / statistics.median(found[name]) / 1e6
        rows.append(f"| {name} | {rate:,.0f} | {statistics.median(ratios):.2f} x the {base} |")
    ratios = [a / b for a, b in zip(found["step meanwhile"], found["step"], strict=True)]
    rows.append(f"| a step meanwhile | | {statistics.median(ratios):.3f} x one without |")
    return "\n".join([*rows, "", f"A checkpoint of {num_bytes / 1e6:,.0f} MB, ranks: {size}, ZeRO 1."])


if __name__ == "__main__":
    from tests.benchmarks import checkpoints  # ranks find its functions by this name

    print(checkpoints.table(*map(int, sys.argv[1:])))
