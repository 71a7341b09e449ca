"""``det-ds check``: whether experiments will run, before they are queued."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.options import COUNT, GivenPath, options, set_option
from determined_ds.report.numbers import count

if TYPE_CHECKING:
    from determined_ds.check.output import Report

EPILOG = """\b
Examples:
  det-ds check experiments/gpt2/const.yaml
  det-ds check experiments/gpt2/const.yaml .
  det-ds check experiments/*/*.yaml experiments/deepspeed/*.json --strict
  det-ds check experiments/gpt2/search.yaml --slots 8
  det-ds check experiments/gpt2/zero3.yaml --explain
  det-ds check experiments/gpt2/const.yaml --explain --json > ds_config.json
  det-ds check experiments/gpt2/const.yaml --memory --gpu-memory 24GiB
  det-ds check --memory --parameters 6B --slots 8 --gpu-memory 80GiB
  det-ds check train.py

\b
Exit code: 0 clean (warnings included), 1 warnings under --strict, 2 errors. A note names what could not be checked,
and does not count. With --memory the table is the answer, and the exit code is 0 even where nothing fits.
"""
WIDEST = 60  # a longer line of JSON moves only its own origin to the right
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
GPU_HELP = "For --memory: of one slot, e.g. 80GiB; shows what fits."
ACCELERATOR_HELP = 'The cluster\'s slots, for which "auto" is filled; default cuda, which needs no GPU here.'
EXPLAIN_HELP = "The exact DeepSpeed configuration, with the source of each value."
JSON_HELP = "One JSON object, for editors and CI. Explained: only the plain configuration."
PRECISION = click.Choice(["bf16", "fp16", "fp32"])
MEMORY_HELP = "The bytes that a rank needs, by strategy. Loads torch."
PARAMETERS_HELP = "Of a model without a CONFIG, e.g. 7B. Loads no torch."
MICRO_HELP, PRECISION_HELP = (
    f"For --memory.  [default: CONFIG's, or {otherwise}]" for otherwise in (1, "bf16")
)
CHECKPOINTING_HELP = "For --memory: blocks are computed again."
memory_options = options(
    click.option("--memory", is_flag=True, help=MEMORY_HELP),
    click.option("--parameters", metavar="COUNT", help=PARAMETERS_HELP),
    click.option("--sequence-length", type=COUNT, help="Tokens of a sample, without a CONFIG."),
    click.option("--micro-batch-size", type=COUNT, help=MICRO_HELP),
    click.option("--precision", type=PRECISION, help=PRECISION_HELP),
    click.option("--activation-checkpointing", is_flag=True, help=CHECKPOINTING_HELP),
)


@click.command(epilog=EPILOG)
@click.argument("config", nargs=-1, type=GivenPath(), metavar="CONFIG... [CONTEXT_DIR]")
@click.option("--slots", type=int, help="Instead of resources.slots_per_trial.")
@set_option
@click.option("--gpu-memory", metavar="SIZE", help=GPU_HELP)
@click.option("--accelerator", type=click.Choice(["cuda", "cpu"]), default="cuda", help=ACCELERATOR_HELP)
@click.option("--explain", "explained", is_flag=True, help=EXPLAIN_HELP)
@memory_options
@click.option("--strict", is_flag=True, help="Exit 1 where there are warnings only.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def check(
    config: tuple[Path, ...],
    gpu_memory: str | None,
    explained: bool,
    strict: bool,
    as_json: bool,
    slots: int | None,
    overrides: tuple[str, ...],
    accelerator: str,
    **asked: Any,
) -> None:
    """Check that experiments will run, over their search space.

    Each CONFIG is an experiment's YAML or a DeepSpeed JSON; CONTEXT_DIR is the code's folder, as for `run`; default:
    the current folder, or the nearest above CONFIG that has the trial. Reports
    what Determined's master would reject, and what it would accept: unknown keys, batches that do not divide,
    strategies that exclude each other, points of a search that cannot run, a missing trial or script, a metric that it
    does not report, secrets in the context directory. Each problem comes with its place and a fix.

    Of a script or trial that was written for another trainer (train.py, trial.py) it reports, line by line, what to
    change for it to run here, and the command that runs it then.

    With --explain only the configuration of one experiment that will run is on stdout; findings are on stderr. The same
    holds for --memory: what a rank needs under every ZeRO stage and offload, of a pipeline under every schedule, and
    what fits. Its model is the experiment's, or given by its sizes without a CONFIG.
    """
    of_memory = gpu_memory is not None or any(value not in (None, False) for value in asked.values())
    alone = "memory" if of_memory else "explain" if explained else ""
    if of_memory and explained:
        raise click.UsageError("--memory and --explain exclude each other")
    if of_memory and not config and not overrides:
        from determined_ds.cli.memory import show_memory

        show_memory(None, asked, slots=slots, gpu_memory=gpu_memory, as_json=as_json)
        return
    if not config:
        raise click.UsageError("Missing argument 'CONFIG... [CONTEXT_DIR]'.")
    context_dir = config[-1] if len(config) > 1 and config[-1].is_dir() else None
    config = config[:-1] if context_dir else config
    if alone and len(config) > 1:
        raise click.UsageError(f"--{alone} takes one experiment, not {len(config)} files")
    from determined_ds.check.experiment import check_files

    reports = check_files(
        config,
        context_dir=context_dir,
        slots=slots,
        overrides=overrides,
        accelerator=accelerator,
    )
    counts = Counter(finding.severity for report in reports for finding in report.findings)
    num_errors, num_warnings = counts["error"], counts["warning"]
    code = 2 if num_errors else 1 if strict and num_warnings else 0
    if as_json and not alone:
        said = [report.as_json() for report in reports]
        found = {"version": 1, "errors": num_errors, "warnings": num_warnings, "files": said}
        click.echo(json.dumps(found, indent=2))
        sys.exit(code)
    for report in reports:
        _show(report, err=bool(alone))
    if not alone:
        summary, colour = f"{count(len(config), 'file')} checked, nothing to fix", "green"
        if num_errors or num_warnings:
            found_in = f"{count(num_errors, 'error')}, {count(num_warnings, 'warning')}"
            summary = f"{found_in} in {count(len(config), 'file')}"
            colour = "red" if num_errors else "yellow"
        click.echo(click.style(summary, fg=colour))
        for line in _run_in_words(reports[0]) if len(config) == 1 and not num_errors else ():
            click.echo(line)
    elif of_memory and not num_errors:
        from determined_ds.cli.memory import show_memory

        show_memory(reports[0], asked, slots=slots, gpu_memory=gpu_memory, as_json=as_json)
    elif not num_errors:
        _explain(reports[0], as_json=as_json)
    sys.exit(code)


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


# ------------------------------------------------------------------------------------------- what will run


def _run_in_words(report: Report) -> list[str]:
    """What will run and what it takes, as far as it is known without building the model: two lines, or none."""
    experiment, resolved = report.experiment, report.resolved
    if experiment is None or resolved is None:
        return []
    strategy, batch, length = resolved.strategy, resolved.batch, resolved.fit.max_length
    degrees = {"layers": strategy.model_parallel_size, "experts": strategy.expert_parallel_size}
    how = [strategy.name, strategy.precision]
    how += [f"{what} divided among {degree} ranks" for what, degree in degrees.items() if degree > 1]
    runs = (
        f"runs on {count(experiment.slots, 'slot')} of {resolved.accelerator.name}: {', '.join(how)}, "
        f"{count(batch.replicas, 'replica')} x micro-batch {batch.micro_batch_size} x {batch.accumulation} accumulation"
    )
    takes = ""
    if length is not None:
        takes = f"takes {length.value:,} {length.unit if length.value != 1 else length.unit[:-1]}"
        takes += f" of {batch.global_batch_size:,} samples" if length.unit == "batches" else ""
    if experiment.searched:
        most = experiment.document.get(("searcher", "max_trials")) or report.size
        takes += f" for each of up to {most:,} trials" if isinstance(most, int) and takes else ""
        runs = f"one point of the search {runs}"
    more = "--explain shows its DeepSpeed configuration, --memory the bytes of a rank"
    return [runs, f"{takes}; {more}" if takes else more]


def _explain(report: Report, *, as_json: bool) -> None:
    """Print the exact DeepSpeed configuration with the source of each value; of a search, that of one point."""
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.decide import left_open

    experiment, resolved = report.experiment, report.resolved
    if experiment is None:
        message = "is not an experiment of determined_ds, whose DeepSpeed configuration could be shown"
        fix = "give an experiment whose entrypoint is `python3 -m determined_ds.train MODULE:CLASS`"
        raise ConfigError(Problem(key="--explain", value=report.file, message=message, fix=fix))
    if resolved is None:
        raise ConfigError(left_open(experiment))
    if as_json:
        click.echo(json.dumps(resolved.ds_config, indent=2))
        return
    head = [f"{experiment.name}: {count(experiment.slots, 'slot')} on {resolved.accelerator.name}"]
    if experiment.searched:
        head.append(f"one point of a search over {', '.join(experiment.searched)}")
    lines = [("{", ""), *_lines(resolved.ds_config, (), dict(resolved.origins)), ("}", "")]
    width = max(len(text) for text, _ in lines if len(text) <= WIDEST)
    for text, origin in [*(("", each) for each in head), *lines]:
        comment = click.style(f"# {origin}", dim=True) if origin else ""
        click.echo(f"{text.ljust(width)}  {comment}" if text and comment else text or comment)


def _lines(data: dict[str, Any], path: tuple[str, ...], origins: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What is in the mapping as indented JSON, a leaf a line, with the origin of each leaf."""
    for number, (key, value) in enumerate(data.items(), 1):
        here = (*path, key)
        indent, comma = "  " * len(here), "," if number < len(data) else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{json.dumps(key)}: {{", ""
            yield from _lines(value, here, origins)
            yield f"{indent}}}{comma}", ""
        else:
            yield f"{indent}{json.dumps(key)}: {json.dumps(value)}{comma}", origins.get(".".join(here), "")
