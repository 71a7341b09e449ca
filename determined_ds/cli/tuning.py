"""``det-ds compare``, ``autotune`` and ``search``: many trainings of one experiment, here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.options import Counts, Names, experiment_options, options, warmup_option

if TYPE_CHECKING:
    from determined_ds.report.results import Results
    from determined_ds.tune.compare import Request

COMPARE = """\b
Strategies: zero0 zero1 zero2 zero3 zero1_offload zero2_offload zero3_offload_optimizer zero3_offload zeropp
pipeline pipeline_zero1 ddp
Schedules of a pipeline: gpipe 1f1b interleaved zb-h1 dualpipev

\b
Examples:
  det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1,zero2,zero3,pipeline
  det-ds compare experiments/gpt2/const.yaml . --strategies ddp,zero1 --slots 1,2
  det-ds compare experiments/gpt2/pipeline.yaml . --strategies 1f1b,interleaved,dualpipev,zb-h1
"""
AUTOTUNE = """\b
Examples:
  det-ds autotune experiments/gpt2/const.yaml . --budget 12
  det-ds autotune experiments/gpt2/const.yaml . --budget 20m --over zero_stage,micro_batch,pipeline
"""
SEARCH = """\b
Examples:
  det-ds search experiments/gpt2/search.yaml .
  det-ds search experiments/gpt2/search.yaml . --set searcher.max_trials=4
  det-ds search runs/gpt2_search/20260101-120000/experiment.yaml . --run-dir runs/gpt2_search/20260101-120000 --resume
"""
AXES = "zero_stage,micro_batch,precision,activation_checkpointing,pipeline,pipe_schedule,offload"
AT_LEAST_1, ABOVE_0 = click.IntRange(min=1), click.FloatRange(min=0, min_open=True)
TOLERANCE_HELP = "Largest relative difference from the loss of fp32; a tenth of it for the first step."


def _measuring(*, steps: int, fewest: int) -> Callable[[Any], Any]:
    """The options of an experiment that is measured."""
    at_least = click.IntRange(min=fewest)
    return options(
        experiment_options("Where the report and the runs go."),
        click.option("--steps", type=at_least, default=steps, show_default=True, help="Steps to time."),
        warmup_option,
    )


@click.command(epilog=COMPARE)
@click.option("--strategies", type=Names(), required=True, help="Which; the first is the baseline.")
@click.option("--slots", type=Counts(), help="Ranks to measure on, e.g. 1,2.  [default: the experiment's]")
@_measuring(steps=30, fewest=1)
@click.option("--repeat", type=AT_LEAST_1, default=3, show_default=True, help="Runs of each, interleaved.")
def compare(strategies: list[str], slots: list[int] | None, repeat: int, **given: Any) -> None:
    """Measure strategies for the experiment CONFIG, each in fresh processes on the same model, data and batch.

    Writes results.json, results.csv and report.html.
    """
    from determined_ds.report.results import MEASURED
    from determined_ds.rundir.signals import Interrupts
    from determined_ds.tune.compare import measure_strategies

    chosen: dict[str, Any] = {"strategies": strategies, "slots": slots, "repeat": repeat}
    with Interrupts("ending the measurement; what was measured so far is reported") as interrupts:
        results, run_dir = measure_strategies(_request(given), interrupts, click.echo, **chosen)
    _show(results, run_dir)
    if interrupts.requested:
        sys.exit(interrupts.exit_code)
    if not any(row.status == MEASURED for row in results.rows):
        click.echo("error: none of the strategies could be measured; see the reasons above", err=True)
        sys.exit(1)


@click.command(epilog=AUTOTUNE)
@click.option("--budget", default="20m", show_default=True, help="A time (20m, 1h), or trials (12).")
@click.option("--over", type=Names(), default=AXES, help=f"What to search over.  [default: {AXES}]")
@_measuring(steps=20, fewest=5)
@click.option("--loss-tolerance", type=ABOVE_0, default=0.05, show_default=True, help=TOLERANCE_HELP)
@click.option("--slots", type=int, help="Ranks; resources.slots_per_trial if absent.")
def autotune(budget: str, over: list[str], loss_tolerance: float, **given: Any) -> None:
    """Find the fastest way to train the experiment CONFIG: its model and its global batch stay as they are.

    Writes best.yaml, with what was chosen, and report.html, results.json and results.csv.
    """
    from determined_ds.tune.autotune import Autotune

    request = _request(given)
    tuning = Autotune(request, budget=budget, over=over, tolerance=loss_tolerance, say=click.echo)
    if (found := tuning.run()) is not None:
        results, best = found
        _show(results, tuning.workbench.run_dir, best=best)
    sys.exit(tuning.interrupts.exit_code)


@click.command(epilog=SEARCH)
@experiment_options("Default: runs/<name>/<time>.")
@click.option("--slots", type=int, help="Slots of a trial; resources.slots_per_trial if absent.")
@click.option("--resume", is_flag=True, help="Resume the search in --run-dir.")
def search(**given: Any) -> None:
    """Run the hyperparameter search CONFIG with the code in CONTEXT_DIR, here.

    The searcher means what it means on a cluster: single, random, grid, adaptive_asha or async_halving. Trials share
    the slots of this machine, or as many of them as resources.max_slots says. Ctrl-C has each trial write a checkpoint;
    --resume continues from there.
    """
    from determined_ds.search.plan import prepare_search
    from determined_ds.search.run import run_search

    sys.exit(run_search(prepare_search(**given)))


def _request(given: dict[str, Any]) -> Request:
    from determined_ds.experiment.secrets import masked_command
    from determined_ds.tune.compare import Request

    return Request(**given, command=masked_command(["det-ds", *sys.argv[1:]]))


def _show(results: Results, run_dir: Path, *, best: str = "") -> None:
    """Print the table and the files that were written."""
    from rich.console import Console

    from determined_ds.report.comparison import results_table
    from determined_ds.rundir.run_dir import short

    click.echo()
    Console().print(results_table(results))
    if best:
        click.echo(f"best: {best}")
    for name in (*(["best.yaml"] if best else []), "report.html", "results.json", "results.csv"):
        click.echo(short(run_dir / name))
