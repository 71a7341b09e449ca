"""What a training loop costs: ours and Determined's against the plain DeepSpeed loop, side by side.

    make bench

The three train the same model on the same data in the same two ranks, in turns, so that a machine that drifts
drifts for all of them. A turn's figure is the mean time from one batch to the next, reports included; a case's is
the median of its turns, and what counts is the ratio.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

# Name of a step's size -> width of the model, samples of a step on a rank, batches in a turn, batches a report,
# turns. Many short turns: what a machine does to one of them, it does to one of many.
SIZES = {"5 ms": (384, 32, 120, 50, 15), "200 ms": (2048, 384, 6, 5, 21)}
LOOPS = ("plain", "ours", "determined")


def measure(size: str, zero_stage: int, accumulation: int, folder: str) -> dict[str, list[float]]:
    """In a rank: seconds a batch of each loop, a figure a turn."""
    import torch
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from tests.benchmarks.parts import Toy, determined_context, determined_trainer, plain_batches

    width, samples, num_batches, report_every, turns = SIZES[size]
    hparams = {
        "global_batch_size": samples * 2,
        "width": width,
        "deepspeed_config": {
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    }
    torch.manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        trials = {name: Toy(context) for name in ("plain", "ours")}
        context.models.pop(0)  # the plain loop's engine is nobody's but its own
        theirs = determined_context(context, hparams)
        trials["determined"] = Toy(theirs)
        options: dict[str, Any] = {"max_length": Batch(num_batches), "reporting_period": Batch(report_every)}
        runs = {
            "plain": lambda: plain_batches(trials["plain"], num_batches),
            "ours": lambda: Trainer(trials["ours"], context).fit(**options, checkpoint_policy="none"),
            "determined": lambda: determined_trainer(trials["determined"], theirs).fit(
                **options, checkpoint_policy="none"
            ),
        }
        for turn in range(turns + 1):
            order = LOOPS[turn % 3 :] + LOOPS[: turn % 3]  # each goes first as often as the others
            for name in order:
                runs[name]()
                if turn:  # the first one warms up
                    seconds[name].append(trials[name].seconds_a_batch())
                trials[name].starts.clear()
    return seconds


def cases() -> Iterator[tuple[str, int, int]]:
    """Every combination that is measured: size, ZeRO stage, accumulation."""
    for size in SIZES:
        for zero_stage in (0, 2):
            for accumulation in (1, 4):
                yield size, zero_stage, accumulation


def table() -> str:
    """Measure every case, showing each as it is done; returns the whole table."""
    rows = [
        "| step | ZeRO | accumulation | plain, ms | ours / plain | Determined / plain |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(2, Path(folder) / "logs")
        for number, (size, zero_stage, accumulation) in enumerate(cases()):
            found = ranks.run(measure, size, zero_stage, accumulation, str(Path(folder) / str(number)))[0]
            plain = found["plain"]
            ours, theirs = (
                [a / b for a, b in zip(found[name], plain, strict=True)] for name in ("ours", "determined")
            )
            rows.append(
                f"| {size} | {zero_stage} | {accumulation} | {statistics.median(plain) * 1e3:.1f} "
                f"| {_spread(ours)} | {_spread(theirs)} |"
            )
            print(rows[-1], flush=True)
    return "\n".join(rows)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
