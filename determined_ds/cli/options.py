"""Options and types of arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Names(click.ParamType):
    """Names with commas between them."""

    name = "NAME,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return [word.strip() for word in str(value).split(",") if word.strip()]


class Counts(click.ParamType):
    """Counts with commas between them."""

    name = "N[,N...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        return [COUNT(word, param, ctx) for word in str(value).split(",")]


class GivenPath(click.Path):
    """A path; an empty text, such as a shell variable that is not set, is not the current folder."""

    def __init__(self, **must: bool) -> None:
        super().__init__(path_type=Path, **must)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several arguments and options as one decorator, in this order."""

    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


COUNT = click.IntRange(1, 2**30)  # beyond, there is nothing to count
SET_HELP = "As det's --config. Repeatable."
set_option = click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help=SET_HELP)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
warmup_option = click.option(
    "--warmup", type=click.IntRange(min=0), default=5, show_default=True, help="Steps before them."
)


def experiment_options(run_dir: str, config: str = "CONFIG") -> Callable[[F], F]:
    """CONFIG and CONTEXT_DIR, ``--set``, ``--run-dir`` with a help, and ``--accelerator``."""
    devices = click.Choice(["cpu", "cuda"])
    return options(
        click.argument("config", type=GivenPath(), metavar=config),
        click.argument("context_dir", type=GivenPath(), default="."),
        set_option,
        click.option("--run-dir", type=GivenPath(), help=run_dir),
        click.option("--accelerator", type=devices, help="Default: CUDA where available."),
    )
