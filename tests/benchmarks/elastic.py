"""What it costs to load the engines of a checkpoint under another strategy, beside a load that changes nothing.

    make bench

Two ranks wrote the checkpoint under ZeRO 1. Each load fills an engine that is built anew, from files that are in the
page cache; DeepSpeed's own loader reads its own files of the same states. In turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

WIDTH = 3072
TURNS = 5
OWN, SLICES = "by DeepSpeed", "slices"
LOADS = ("zero1", OWN, "zero0", "zero2", "zero3")


def write(folder: str, width: int) -> int:
    """In a rank: write both layouts after a step; the bytes of the slices."""
    from determined_ds.runtime.checkpoints.all_engines import Engines
    from determined_ds.runtime.checkpoints.built import records_of

    with _trial(folder, width, 1) as (trial, context):
        trial.train_batch(iter(trial.training_loader(trial.data)), 0, 0)
        engines = Engines(trial, context, records_of(context.models))
        there = Path(folder) / SLICES
        engines.write_indexes(there, engines.write(there, engines.take(), lambda: None))
        trial.engine.save_checkpoint(str(Path(folder) / OWN), tag="model0")
        context.distributed.allgather(None)
        return sum(file.stat().st_size for file in there.rglob("*.safetensors"))


def load(folder: str, width: int, name: str) -> float:
    """In a rank: seconds to load."""
    from determined_ds.runtime.checkpoints.all_engines import Engines
    from determined_ds.runtime.checkpoints.built import records_of
    from determined_ds.runtime.checkpoints.contents import only_data

    stage = 1 if name == OWN else int(name[-1])
    with _trial(folder, width, stage) as (trial, context), only_data():
        engines = Engines(trial, context, records_of(context.models))
        context.distributed.allgather(None)
        started = time.perf_counter()
        if name == OWN:
            trial.engine.load_checkpoint(str(Path(folder) / OWN), tag="model0")
        else:
            engines.read(Path(folder) / SLICES, "the one")
        context.distributed.allgather(None)
        return time.perf_counter() - started


def _trial(folder: str, width: int, stage: int) -> Any:
    import contextlib

    from determined_ds import open_context
    from tests.benchmarks.parts import Saved

    hparams = {
        "global_batch_size": 8,
        "width": width,
        "deepspeed_config": {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
    }

    @contextlib.contextmanager
    def opened() -> Any:
        with open_context(hparams=hparams, run_dir=f"{folder}/run", accelerator="cpu") as context:
            yield Saved(context), context

    return opened()


def table(width: int = WIDTH) -> str:
    """Measure, and return the table."""
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = str(Path(made).resolve())
        ranks = Ranks(2, Path(folder) / "logs")
        num_bytes = sum(set(ranks.run(write, folder, width)))
        seconds: dict[str, list[float]] = {name: [] for name in LOADS}
        for turn in range(TURNS + 1):  # the first fills the page cache
            for name in LOADS:
                took = max(ranks.run(load, folder, width, name))
                if turn:
                    seconds[name].append(took)
    rows = ["| load | s | against the same strategy |", "|---|---|---|"]
    for name in LOADS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["zero1"], strict=True)]
        rows.append(f"| {name} | {statistics.median(seconds[name]):.3f} | {statistics.median(ratios):.2f} |")
    return "\n".join(
        [*rows, "", f"{num_bytes / 1e6:,.0f} MB, written by two ranks under ZeRO 1, read by two."]
    )


if __name__ == "__main__":
    from tests.benchmarks import elastic  # ranks find its functions by this name

    print(elastic.table())
