"""``det-ds bench``: what this machine, or the slots of this task, can do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.options import Names

if TYPE_CHECKING:
    from determined_ds.bench.plan import BenchPlace
    from determined_ds.protocol.machine_file import MachineFigures

SECONDS = 60
DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\b
Examples:
  det-ds bench communication
  det-ds bench communication --slots 2 --accelerator cpu --seconds 20
  srun --ntasks 16 det-ds bench communication      # over machines, as det-ds run

\b
Figures are kept in a file of this machine (DETERMINED_DS_MACHINE names another), where estimate and autotune take
them from; a later measurement of one kind keeps those of the others.
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure what this machine, or the slots of this task, can do."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every kind has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object."),
        click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/bench_<kind>/<time>."),
        click.option(
            "--seconds", type=click.FloatRange(min=1), default=SECONDS, show_default=True, help="At most."
        ),
        click.option(
            "--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where available."
        ),
        click.option("--slots", type=click.IntRange(min=1), help="Ranks.  [default: one a GPU; 2 on a CPU]"),
    ):
        command = option(command)
    return command


@bench.command()
@click.option("--collectives", type=Names(), help="Which.  [default: all]")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Of the elements."
)
@click.option("--largest", help="Largest size, e.g. 64MiB.  [default: 64MiB on a CPU, 1GiB on GPUs]")
@_common
def communication(
    collectives: list[str] | None,
    dtype: str,
    largest: str | None,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Time all-reduce, reduce-scatter, all-gather, send, broadcast and all-to-all between ranks, by size.

    By the backend that training uses here, through torch and, in turns with it, through DeepSpeed with its own log.
    Started by torchrun, srun, mpirun or deepspeed, the command is one of the ranks and starts none.
    """
    from determined_ds.bench.plan import LARGEST_BYTES, check_words, decide_where
    from determined_ds.memory import parse_bytes
    from determined_ds.protocol.machine_figures import COLLECTIVES, COMMUNICATION
    from determined_ds.runtime.benching.bench_request import BenchRequest

    names = list(COLLECTIVES) if collectives is None else collectives
    check_words("--collectives", names, COLLECTIVES)
    where = decide_where(COMMUNICATION, **given)
    size = LARGEST_BYTES[where.accelerator.name] if largest is None else parse_bytes(largest, key="--largest")
    request = BenchRequest(
        bench=COMMUNICATION,
        accelerator=where.accelerator.name,
        seconds=seconds,
        command=_command(),
        collectives=tuple(names),
        dtype=dtype,
        largest_bytes=size,
    )
    _measure(where, request, as_json)


def _command() -> str:
    from determined_ds.experiment.secrets import masked_command

    return masked_command(["det-ds", *sys.argv[1:]])


def _measure(where: BenchPlace, request: Any, as_json: bool) -> None:
    """Measure in ranks, keep the figures and show them."""
    from determined_ds.bench.figures_kept import check_kept
    from determined_ds.bench.in_ranks import measure_in_ranks
    from determined_ds.devices import hardware_here
    from determined_ds.protocol.machine_file import machine_path

    if where.is_chief:
        hardware = hardware_here(where.accelerator)
        check_kept(machine_path(hardware))
        click.echo(f"{request.bench}: {where}; about {request.seconds:.0f} s after the start", err=True)
        click.echo(f"  {hardware}", err=True)
    ended = measure_in_ranks(where, request)
    if ended.machine is not None:
        _show(ended.machine, where.run_dir, as_json)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.placed is not None:  # threads of the process group may wait for a peer that is gone
        os._exit(ended.code)
    sys.exit(ended.code)


def _show(machine: MachineFigures, run_dir: Path, as_json: bool) -> None:
    from determined_ds.bench.figures_kept import keep
    from determined_ds.bench.shown import lines_of
    from determined_ds.protocol.machine_file import machine_text
    from determined_ds.protocol.run_dir import short

    path, note = keep(machine, run_dir)
    if as_json:
        click.echo(machine_text(machine), nl=False)
    else:
        click.echo("\n".join(["", *lines_of(machine), ""]))
    if note:
        click.echo(f"warning: {note}", err=True)
    click.echo(f"{short(run_dir)}: the figures and a picture; kept in {path}", err=True)
