"""``det-ds doctor``, or ``python3 -m determined_ds.doctor`` in a task: what this machine can run, and what it lacks."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds doctor
  det-ds doctor experiments/gpt2/zero3.yaml
  det-ds doctor --measure                # or of several machines: srun --ntasks 16 det-ds doctor --measure
  det cmd run --context . --include experiments/gpt2/const.yaml 'python3 -m determined_ds.doctor const.yaml'

\b
Exit code: 0 CONFIG can run here (without CONFIG: nothing is broken), 1 something is missing, 2 CONFIG is invalid.
"""
COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}
A_PATH = click.Path(path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("config", type=A_PATH, required=False)
@click.argument("context_dir", type=A_PATH, default=".")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA if available.")
@click.option("--run-dir", type=A_PATH, default="runs", help="Of the run; default: runs.")
@click.option(
    "--measure", "measures", is_flag=True, help="Measure instead: matrix products, and collectives."
)
@click.option("--slots", type=click.IntRange(min=1), help="Of --measure: ranks.")
def doctor(
    config: Path | None,
    context_dir: Path,
    accelerator: str | None,
    run_dir: Path,
    measures: bool,
    slots: int | None,
) -> None:
    """Check what this machine, or this task's container, can run, and say how to get what it lacks.

    GPUs, driver and torch, compilers, shared memory, interfaces, versions, disk; with CONFIG, what this experiment
    needs of them, and its checkpoint storage, where a small object is written, read and deleted.
    """
    if measures:
        if config is not None:
            raise click.UsageError("--measure measures this machine; leave CONFIG out")
        from determined_ds.doctor.measure import measure

        sys.stdout.flush()
        sys.exit(measure(slots=slots, accelerator=accelerator))
    if slots is not None:
        raise click.UsageError("--slots is for --measure; CONFIG states its own slots")
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from determined_ds.doctor.examine import examine
    from determined_ds.report.numbers import terminal_width

    table, counts = (
        Table.grid(Column(width=7), Column(no_wrap=True), "", padding=(0, 2, 0, 0)),
        Counter[str](),
    )
    for finding in examine(config, context_dir.absolute(), run_dir, accelerator):
        counts[finding.state] += 1
        text = finding.found
        if finding.state != "ok":
            text += f"\nneeded: {finding.needed}" * bool(finding.needed) + f"\nfix: {finding.fix}" * bool(
                finding.fix
            )
        state = f"[{COLOURS[finding.state]}]{finding.state}"
        table.add_row(state, escape(finding.name), escape(text))
    Console(width=terminal_width(), highlight=False).print(table)
    click.echo(", ".join(f"{counts[state]} {state}" for state in COLOURS if counts[state]))
    sys.exit(1 if counts["missing"] else 0)


if __name__ == "__main__":
    from determined_ds.errors import ConfigError, lines_of_error

    try:
        doctor(prog_name="python3 -m determined_ds.doctor")
    except ConfigError as error:
        print("\n".join(lines_of_error(error)), file=sys.stderr)
        sys.exit(error.exit_code)
