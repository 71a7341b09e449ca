"""``python -m tests.campaigns NAME``: long attacks with random choices. See README.md."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from tests.campaigns.case import Case
from tests.campaigns.causes import planted_causes
from tests.campaigns.files import mutated_files
from tests.campaigns.kills import kills
from tests.campaigns.trials import mutated_trials

CAMPAIGNS: dict[str, Callable[[int, random.Random, Path], Iterator[Case]]] = {
    "kills": kills,
    "trials": mutated_trials,
    "files": mutated_files,
    "causes": planted_causes,
}


@click.command()
@click.argument("name", type=click.Choice(list(CAMPAIGNS)))
@click.option("--count", type=click.IntRange(min=1), default=50, show_default=True, help="Cases.")
@click.option("--seed", type=int, help="Of the choices; drawn if absent.")
def main(name: str, count: int, seed: int | None) -> None:
    """Run the campaign NAME."""
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    click.echo(f"{name}: {count} cases, seed {seed}")
    num_cases, failures = 0, []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for case in CAMPAIGNS[name](count, random.Random(seed), Path(folder)):
            num_cases += 1
            click.echo(f"{num_cases:4d}  {'FAILED' if case.failures else 'ok':<6}  {case.name}")
            for failure in case.failures:
                click.echo(f"        {failure}")
            failures += [case] if case.failures else []
            sys.stdout.flush()
    click.echo(f"{num_cases} cases, {len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
