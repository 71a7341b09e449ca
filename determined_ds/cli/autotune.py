"""``det-ds autotune``: the fastest way to carry out a training, found here."""

from __future__ import annotations

from typing import Any

import click

from determined_ds.cli.options import (
    Names,
    exit_if_interrupted,
    measuring_options,
    request_of,
    show_results,
)

ALL = "zero_stage,micro_batch,precision,activation_checkpointing,pipeline,pipe_schedule,offload"
EPILOG = """\b
Examples:
  det-ds autotune experiments/gpt2/const.yaml . --budget 12
  det-ds autotune experiments/gpt2/const.yaml . --budget 20m --over zero_stage,micro_batch,pipeline
"""


@click.command(epilog=EPILOG)
@click.option("--budget", default="20m", show_default=True, help="A time (20m, 1h), or trials (12).")
@click.option("--over", type=Names(), default=ALL, help=f"What to search over.  [default: {ALL}]")
@measuring_options(steps=20, fewest=5)
@click.option(
    "--loss-tolerance",
    "tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="Largest relative difference from the loss of fp32; a tenth of it for the first step.",
)
@click.option("--slots", type=int, help="Ranks; resources.slots_per_trial if absent.")
def autotune(budget: str, over: list[str], tolerance: float, **options: Any) -> None:
    """Find the fastest way to train the experiment CONFIG: its model and its global batch stay as they are.

    Writes best.yaml, with what was chosen, and report.html, results.json and results.csv.
    """
    from determined_ds.tune.autotune import Autotune

    chosen: dict[str, Any] = {"budget": budget, "over": over, "tolerance": tolerance}
    tuning = Autotune(request_of(options), say=click.echo, **chosen)
    run_dir = tuning.workbench.run_dir
    if (found := tuning.run()) is not None:
        results, best = found
        show_results(results, run_dir, best=best)
    exit_if_interrupted(tuning.interrupts, run_dir)
