"""What ``fit.breakdown`` costs: one trial trained with it and without, in turns, on two ranks.

python -c "from tests.benchmarks.breakdown import table; print(table())"
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

from tests.ranks import Ranks

# Name of a step's size -> width of the model, samples of a step on a rank, batches in a turn, turns.
SIZES = {"5 ms": (384, 32, 60, 15), "50 ms": (1024, 192, 20, 11), "200 ms": (2048, 384, 8, 9)}


def measure(size: str, zero_stage: int, folder: str) -> list[tuple[float, float]]:
    """In a rank: seconds a batch, with and without, a pair a turn; the median of the batches of the turn."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from tests.benchmarks.parts import Toy

    width, samples, num_batches, turns = SIZES[size]
    hparams = {
        "global_batch_size": samples * 2,
        "width": width,
        "deepspeed_config": {
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    }
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        trial = Toy(context)

        def seconds_a_batch(breakdown: bool) -> float:
            trial.starts.clear()
            lengths = {"max_length": Batch(num_batches), "reporting_period": Batch(num_batches // 4)}
            Trainer(trial, context).fit(**lengths, checkpoint_policy="none", breakdown=breakdown)
            return statistics.median(after - before for before, after in itertools.pairwise(trial.starts))

        found = []
        for turn in range(turns + 1):
            pair = {on: seconds_a_batch(on) for on in ((True, False) if turn % 2 else (False, True))}
            found.append((pair[True], pair[False]))
        return found[1:]  # the first turn warms up


def table() -> str:
    """Measure, and return the table."""
    rows = ["| step | ZeRO | without, ms | with / without |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(2, Path(folder) / "logs")
        for number, (size, stage) in enumerate(itertools.product(SIZES, (0, 1, 3))):
            found = ranks.run(measure, size, stage, str(Path(folder) / str(number)))[0]
            ratios = sorted(on / off for on, off in found)
            plain_ms = 1000 * statistics.median(off for _, off in found)
            ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            rows.append(f"| {size} | {stage} | {plain_ms:.1f} | {ratio} |")
            print(rows[-1], flush=True)
    return "\n".join(rows)
