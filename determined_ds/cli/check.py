"""``det-ds check``: whether experiments will run, before they are queued."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.explain import explain, run_in_words
from determined_ds.cli.memory import memory_options, show_memory
from determined_ds.cli.options import GivenPath, set_option
from determined_ds.rundir.handed_on import count

if TYPE_CHECKING:
    from determined_ds.check.experiment import DoesNotFit
    from determined_ds.check.output import Report

EPILOG = """\b
Examples:
  det-ds check experiments/gpt2/const.yaml
  det-ds check experiments/gpt2/const.yaml .
  det-ds check experiments/*/*.yaml experiments/deepspeed/*.json --strict
  det-ds check experiments/gpt2/search.yaml --slots 8 --gpu-memory 80GiB
  det-ds check experiments/gpt2/zero3.yaml --explain
  det-ds check experiments/gpt2/const.yaml --explain --json > ds_config.json
  det-ds check experiments/gpt2/pipeline.yaml --slots 16 --ranks --slots-per-machine 8
  det-ds check experiments/gpt2/const.yaml --memory --gpu-memory 24GiB
  det-ds check --memory --parameters 6B --slots 8 --gpu-memory 80GiB
  det-ds check train.py

\b
Exit code: 0 clean (warnings included), 1 warnings under --strict, 2 errors. A note names what could not be checked,
and does not count. With --gpu-memory alone, a point that does not fit is an error; with --memory the table is the
answer, and the exit code is 0 even where nothing fits.
"""
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
CONTEXT_HELP = "CONTEXT_DIR; default: the current folder, or the nearest above CONFIG that has the trial."
GPU_HELP = "Of one slot, e.g. 80GiB: check that every point fits. Loads torch."
ACCELERATOR_HELP = 'The cluster\'s slots, for which "auto" is filled; default cuda, which needs no GPU here.'
EXPLAIN_HELP = "The exact DeepSpeed configuration, with the source of each value."
RANKS_HELP = "Explain only which rank stands where, machine by machine."
MACHINE_HELP = "To explain the ranks; default: all are on one machine."
JSON_HELP = "One JSON object, for editors and CI. Explained: only the plain value."


@click.command(epilog=EPILOG)
@click.argument("config", nargs=-1, type=GivenPath(), metavar="CONFIG... [CONTEXT_DIR]")
@click.option("--context", "context_dir", type=GivenPath(exists=True, file_okay=False), help=CONTEXT_HELP)
@click.option("--slots", type=int, help="Instead of resources.slots_per_trial.")
@set_option
@click.option("--gpu-memory", metavar="SIZE", help=GPU_HELP)
@click.option("--accelerator", type=click.Choice(["cuda", "cpu"]), default="cuda", help=ACCELERATOR_HELP)
@click.option("--explain", "explained", is_flag=True, help=EXPLAIN_HELP)
@click.option("--ranks", "only_ranks", is_flag=True, help=RANKS_HELP)
@click.option("--slots-per-machine", type=click.IntRange(min=1), help=MACHINE_HELP)
@memory_options
@click.option("--strict", is_flag=True, help="Exit 1 where there are warnings only.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def check(
    config: tuple[Path, ...],
    context_dir: Path | None,
    slots: int | None,
    overrides: tuple[str, ...],
    gpu_memory: str | None,
    accelerator: str,
    explained: bool,
    only_ranks: bool,
    slots_per_machine: int | None,
    strict: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Check that experiments will run, over their search space.

    Each CONFIG is an experiment's YAML or a DeepSpeed JSON; CONTEXT_DIR is the code's folder, as for `run`. Reports
    what Determined's master would reject, and what it would accept: unknown keys, batches that do not divide,
    strategies that exclude each other, points of a search that cannot run, a missing trial or script, a metric that it
    does not report, secrets in the context directory. Each problem comes with its place and a fix.

    Of a script or trial that was written for another trainer (train.py, trial.py) it reports, line by line, what to
    change for it to run here, and the command that runs it then.

    With --explain, --ranks or --slots-per-machine only the configuration of one experiment that will run is on stdout;
    findings are on stderr. The same holds for --memory: what a rank needs under every ZeRO stage and offload, of a
    pipeline under every schedule, and what fits. Its model is the experiment's, or given by its sizes without a CONFIG.
    """
    in_bytes = any(value not in (None, False) for value in asked.values())
    explained = explained or only_ranks or slots_per_machine is not None
    if in_bytes and explained:
        raise click.UsageError("--memory and --explain exclude each other")
    if in_bytes and not config and not overrides and context_dir is None:
        show_memory(None, asked, slots=slots, gpu_memory=gpu_memory, as_json=as_json)
        return
    if not config:
        raise click.UsageError("Missing argument 'CONFIG... [CONTEXT_DIR]'.")
    from determined_ds.check.experiment import check_files

    files = config
    if context_dir is None and len(files) > 1 and files[-1].is_dir():
        files, context_dir = files[:-1], files[-1]
    if (explained or in_bytes) and len(files) > 1:
        raise click.UsageError(
            f"--{'explain' if explained else 'memory'} takes one experiment, not {len(files)} files"
        )
    reports = check_files(
        files,
        context_dir=context_dir,
        slots=slots,
        overrides=overrides,
        accelerator=accelerator,
        does_not_fit=None if gpu_memory is None or in_bytes else _does_not_fit(gpu_memory),
    )
    counts = Counter(finding.severity for report in reports for finding in report.findings)
    num_errors, num_warnings = counts["error"], counts["warning"]
    code = 2 if num_errors else 1 if strict and num_warnings else 0
    if as_json and not (explained or in_bytes):
        said = [report.as_json() for report in reports]
        found = {"version": 1, "errors": num_errors, "warnings": num_warnings, "files": said}
        click.echo(json.dumps(found, indent=2))
        sys.exit(code)
    for report in reports:
        _show(report, err=explained or in_bytes)
    if num_errors and (explained or in_bytes):
        sys.exit(code)
    if in_bytes:
        show_memory(reports[0], asked, slots=slots, gpu_memory=gpu_memory, as_json=as_json)
    elif explained:
        explain(reports[0], only_ranks=only_ranks, slots_per_machine=slots_per_machine, as_json=as_json)
    else:
        summary, colour = f"{count(len(files), 'file')} checked, nothing to fix", "green"
        if num_errors or num_warnings:
            found_in = f"{count(num_errors, 'error')}, {count(num_warnings, 'warning')}"
            summary = f"{found_in} in {count(len(files), 'file')}"
            colour = "red" if num_errors else "yellow"
        click.echo(click.style(summary, fg=colour))
        for line in run_in_words(reports[0]) if len(files) == 1 and not num_errors else ():
            click.echo(line)
    sys.exit(code)


def _does_not_fit(size: str) -> DoesNotFit:
    from determined_ds.memory.fitting import memory_problem
    from determined_ds.memory.units import parse_bytes

    num_bytes = parse_bytes(size)

    def does_not_fit(experiment: Any, resolved: Any, context_dir: Path, point: Any) -> Any:
        from determined_ds.train.shape import shape_of_experiment  # loads torch

        shape = shape_of_experiment(experiment, resolved, context_dir, hyperparameters=point)
        return memory_problem(num_bytes, shape, point, resolved)

    return does_not_fit


def _show(report: Report, *, err: bool) -> None:
    from determined_ds.check.output import text_lines

    for finding in report.findings:
        place, severity, message, below = text_lines(finding, report.file)
        head = f"{click.style(place, bold=True)}: {click.style(severity, fg=COLOURS[severity])}: {message}"
        click.echo("\n    ".join([head, *below]), err=err)
    if report.kind == "experiment" and report.num_points > 1 and report.num_runnable:
        click.echo(f"{report.file}: {report.points_in_words()}", err=err)
    if report.run:
        click.echo(f"{report.file}: run it with: {report.run}", err=err)
