"""What ``det-ds check`` says of the configuration that will run: two lines below its verdict, or every value of it.

Both read what the check has resolved: an experiment is decided once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from determined_ds.rundir.handed_on import count

if TYPE_CHECKING:
    from determined_ds.check.output import Report

WIDEST = 60  # a longer line moves only its own origin to the right


def run_in_words(report: Report) -> list[str]:
    """What will run and what it takes, as far as it is known without building the model.

    Args:
        report: Of a file in which no error was found.

    Returns:
        Two lines; none where the code decides batch and strategy, and for what is not an experiment.
    """
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


def explain(report: Report, *, only_ranks: bool, slots_per_machine: int | None, as_json: bool) -> None:
    """Print the exact DeepSpeed configuration with the source of each value, and the ranks on their machines.

    Args:
        report: Of an experiment in which no error was found. Of a search, one point is shown.
        only_ranks: Print only which rank stands where, machine by machine.
        slots_per_machine: None where all slots are on one machine.
        as_json: Print the plain configuration, or the plain ranks.

    Raises:
        ConfigError: nothing of it is known before it runs.
    """
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.decide import left_open

    experiment, resolved = report.experiment, report.resolved
    if experiment is None:
        message = "is not an experiment of determined_ds, whose DeepSpeed configuration could be shown"
        fix = "give an experiment whose entrypoint is `python3 -m determined_ds.train MODULE:CLASS`"
        raise ConfigError(Problem(key="--explain", value=report.file, message=message, fix=fix))
    if resolved is None:
        raise ConfigError(left_open(experiment))
    layout, per_machine = resolved.topology, slots_per_machine or experiment.slots
    every = [layout.coordinates(rank) for rank in range(layout.slots)]
    if as_json:
        places = [
            {"rank": rank, "machine": rank // per_machine, "slot": rank % per_machine, **place}
            for rank, place in enumerate(every)
        ]
        click.echo(json.dumps(places if only_ranks else resolved.ds_config, indent=2))
        return
    axes = [name for name in ("pipe", "sequence", "model", "data") if layout.axes[name] > 1] or ["data"]
    cells = [" ".join(f"{name} {place[name]}" for name in axes) for place in every]
    width = max(map(len, cells))
    machines = [
        f"machine {first // per_machine}".ljust(12)
        + " | ".join(cell.ljust(width) for cell in cells[first : first + per_machine]).rstrip()
        for first in range(0, layout.slots, per_machine)
    ]
    if only_ranks:
        click.echo("\n".join(machines))
        return

    def comment(text: str) -> str:
        return click.style(f"# {text}", dim=True)

    click.echo(
        comment(f"{experiment.name}: {count(experiment.slots, 'slot')} on {resolved.accelerator.name}")
    )
    if experiment.searched:
        click.echo(comment(f"one point of a search over {', '.join(experiment.searched)}"))
    lines = [("{", ""), *_lines(resolved.ds_config, (), dict(resolved.origins)), ("}", "")]
    width = max(len(text) for text, _ in lines if len(text) <= WIDEST)
    for text, origin in lines:
        click.echo(f"{text.ljust(width)}  {comment(origin)}" if origin else text)
    if experiment.slots > 1:
        click.echo("\n".join(map(comment, machines)))


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
