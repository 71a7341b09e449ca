"""``det-ds doctor``, or ``python3 -m determined_ds.doctor`` in a task: what this machine can run, and what it lacks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds doctor
  det-ds doctor experiments/gpt2/zero3_offload.yaml
  det-ds doctor --measure                # or of several machines: srun --ntasks 16 det-ds doctor --measure
  det cmd run --context . 'python3 -m determined_ds.doctor experiments/gpt2/const.yaml'    # in a task

\b
Exit code: 0 CONFIG can run here (without CONFIG: nothing is broken), 1 something is missing, 2 CONFIG is invalid.
"""
COLOURS = {"ok": "green", "warning": "yellow", "missing": "red", "unknown": "cyan"}


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA if available.")
@click.option("--run-dir", type=click.Path(path_type=Path), default="runs", help="Of the run; default: runs.")
@click.option(
    "--measure", "measures", is_flag=True, help="Measure instead: matrix products, and collectives by size."
)
@click.option(
    "--slots", type=click.IntRange(min=1), help="Of --measure: ranks.  [default: one a GPU; 2 on a CPU]"
)
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=20, show_default=True, help="Of --measure: at most."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def doctor(
    config: Path | None,
    context_dir: Path,
    accelerator: str | None,
    run_dir: Path,
    measures: bool,
    slots: int | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Check what this machine, or this task's container, can run, and say how to get what it lacks.

    GPUs, driver and torch, compilers, shared memory, interfaces, versions, disk; with CONFIG, what this experiment
    needs of them, and its checkpoint storage, where a small object is written, read and deleted.
    """
    if measures:
        if config is not None:
            raise click.UsageError("--measure measures this machine; leave CONFIG out")
        try:  # what starts ranks is not sent to a cluster: a task that trains has them
            measuring = importlib.import_module("determined_ds.doctor.measure")
        except ModuleNotFoundError as error:
            message = "--measure needs determined_ds installed in the image: pip install determined-ds"
            raise click.UsageError(message) from error
        sys.stdout.flush()
        sys.exit(measuring.measure(slots=slots, accelerator=accelerator, seconds=seconds, as_json=as_json))
    if slots is not None:
        raise click.UsageError("--slots is for --measure; CONFIG states its own slots")
    from determined_ds.doctor.examine import STATES, examine
    from determined_ds.report.table import terminal_width, wrapped

    findings = examine(config, context_dir.absolute(), run_dir, accelerator)
    counts = {state: sum(finding.state == state for finding in findings) for state in STATES}
    if as_json:
        shown = {"version": 1, **counts, "findings": [finding._asdict() for finding in findings]}
        click.echo(json.dumps(shown, indent=2))
        sys.exit(1 if counts["missing"] else 0)
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 11)
    for finding in findings:
        texts = [finding.found]
        texts += [f"needed: {finding.needed}"] if finding.needed and finding.state != "ok" else []
        texts += [f"fix: {finding.fix}"] if finding.fix else []
        lines = [line for text in texts for line in wrapped(text, max(30, terminal_width() - len(indent)))]
        state = click.style(f"{finding.state:<8}", fg=COLOURS[finding.state])
        click.echo(f"\n{indent}".join([f"{state} {finding.name:<{width}}  {lines[0]}", *lines[1:]]))
    click.echo(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    sys.exit(1 if counts["missing"] else 0)


if __name__ == "__main__":
    from determined_ds.errors import ConfigError

    try:
        doctor(prog_name="python3 -m determined_ds.doctor")
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(error.exit_code)
