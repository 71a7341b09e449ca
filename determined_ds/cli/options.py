"""Options that several commands have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from determined_ds.report.results import Results
    from determined_ds.rundir.signals import Interrupts
    from determined_ds.tune.measure import Request

F = TypeVar("F", bound=Callable[..., Any])


class Names(click.ParamType):
    """Names with commas between them."""

    name = "NAME,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return [word.strip() for word in str(value).split(",") if word.strip()]


class Count(click.ParamType):
    """A whole number of at least 1; beyond 2**30 there is nothing to count."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if not str(value).isdecimal() or not 1 <= int(str(value)) <= 2**30:
            self.fail(f"{str(value)!r} is not a whole number from 1 to {2**30}", param, ctx)
        return int(str(value))


class Numbers(click.ParamType):
    """Whole numbers of at least 1, with commas between them."""

    name = "N[,N...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        return [Count().convert(word.strip(), param, ctx) for word in str(value).split(",")]


class GivenPath(click.Path):
    """A path; an empty text, such as a shell variable that is not set, is not the current folder."""

    def __init__(self, **must: bool) -> None:
        super().__init__(path_type=Path, **must)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


def set_option(command: F) -> F:
    """``--set``, as ``overrides``."""
    return click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable."
    )(command)


def experiment_options(run_dir: str) -> Callable[[F], F]:
    """CONFIG and CONTEXT_DIR, ``--set``, ``--run-dir`` and ``--accelerator``.

    Args:
        run_dir: Help of ``--run-dir``.
    """
    return _all(
        click.argument("config", type=GivenPath()),
        click.argument("context_dir", type=GivenPath(), default="."),
        set_option,
        click.option("--run-dir", type=GivenPath(), help=run_dir),
        click.option(
            "--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where available."
        ),
    )


def measuring_options(*, steps: int, fewest: int) -> Callable[[F], F]:
    """Those of an experiment that is measured: also ``--steps`` and ``--warmup``."""
    at_least = click.IntRange(min=fewest)
    return _all(
        experiment_options("Where the report goes; runs that are already there are not repeated."),
        click.option("--steps", type=at_least, default=steps, show_default=True, help="Steps to time."),
        click.option(
            "--warmup", type=click.IntRange(min=0), default=5, show_default=True, help="Steps before them."
        ),
    )


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def request_of(options: dict[str, Any]) -> Request:
    """The options of :func:`measuring_options` as one value."""
    from determined_ds.experiment.secrets import masked_command
    from determined_ds.tune.measure import Request

    return Request(**options, command=masked_command(["det-ds", *sys.argv[1:]]))


def show_results(results: Results, run_dir: Path, *, best: str = "") -> None:
    """Print the table and the files that were written."""
    from rich.console import Console

    from determined_ds.report.columns import results_tables
    from determined_ds.rundir.run_dir import short

    for table in results_tables(results):
        click.echo()
        Console().print(table)
    if best:
        click.echo(f"best: {best}")
    for name in (*(["best.yaml"] if best else []), "report.html", "results.json", "results.csv"):
        click.echo(short(run_dir / name))


def exit_if_interrupted(interrupts: Interrupts, run_dir: Path) -> None:
    """End the command where it was interrupted, with what to type to resume."""
    from determined_ds.rundir.run_dir import short

    if interrupts.requested:
        click.echo(f"interrupted; to resume: the same command with --run-dir {short(run_dir)}", err=True)
        sys.exit(interrupts.exit_code)
