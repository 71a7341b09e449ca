"""``det-ds compare``: strategies side by side, measured here."""

from __future__ import annotations

import sys
from typing import Any

import click

from determined_ds.cli.options import (
    Names,
    Numbers,
    exit_if_interrupted,
    measuring_options,
    request_of,
    show_results,
)
from determined_ds.config.params import MOST_ACTIVE

EPILOG = """\b
Strategies: zero0 zero1 zero2 zero3 zero1_offload zero2_offload zero3_offload_optimizer zero3_offload zeropp
pipeline pipeline_zero1 ddp
Schedules of a pipeline: gpipe 1f1b interleaved zb-h1 dualpipev

\b
Examples:
  det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1,zero2,zero3,pipeline
  det-ds compare experiments/gpt2/const.yaml . --strategies ddp,zero1 --slots 1,2
  det-ds compare experiments/gpt2/pipeline.yaml . --strategies 1f1b,interleaved,dualpipev,zb-h1
"""


@click.command(epilog=EPILOG)
@click.option("--strategies", type=Names(), required=True, help="Which; the first is the baseline.")
@click.option("--slots", type=Numbers(), help="Ranks to measure on, e.g. 1,2.  [default: the experiment's]")
@measuring_options(steps=30, fewest=1)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each, interleaved."
)
@click.option(
    "--parts",
    type=click.IntRange(0, MOST_ACTIVE),
    default=3,
    show_default=True,
    help="Steps to take apart after those of the first run of each, by torch's profiler. 0: none.",
)
def compare(strategies: list[str], slots: list[int] | None, repeat: int, parts: int, **options: Any) -> None:
    """Measure strategies for the experiment CONFIG, each in fresh processes on the same model, data and batch.

    Writes results.json, results.csv and report.html.
    """
    from determined_ds.report.results import MEASURED
    from determined_ds.rundir.signals import Interrupts
    from determined_ds.tune.compare import measure_strategies

    chosen: dict[str, Any] = {"strategies": strategies, "slots": slots, "repeat": repeat, "parts": parts}
    with Interrupts("ending the measurement; what was measured so far is reported") as interrupts:
        results, run_dir = measure_strategies(request_of(options), interrupts, click.echo, **chosen)
    show_results(results, run_dir)
    exit_if_interrupted(interrupts, run_dir)
    if not any(row.status == MEASURED for row in results.rows):
        click.echo("error: none of the strategies could be measured; see the reasons above", err=True)
        sys.exit(1)
