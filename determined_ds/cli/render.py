"""``det-ds render``: the exact DeepSpeed configuration, with the source of each value; and which rank stands where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from determined_ds.config.topology import Topology

EPILOG = """\b
Examples:
  det-ds render experiments/gpt2/zero3.yaml
  det-ds render experiments/gpt2/const.yaml --set hyperparameters.global_batch_size=64
  det-ds render experiments/gpt2/const.yaml --accelerator cuda --json > ds_config.json
  det-ds render experiments/gpt2/pipeline.yaml --slots 16 --ranks --slots-per-machine 8
"""
WIDEST = 60  # a longer line moves only its own origin to the right


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--slots", type=int, help="Instead of resources.slots_per_trial.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Like det's --config. Repeatable."
)
@click.option(
    "--accelerator",
    type=click.Choice(["cpu", "cuda"]),
    help='What "auto" is filled for; default: this machine\'s. cuda needs no GPU here.',
)
@click.option("--ranks", "only_ranks", is_flag=True, help="Only which rank stands where, machine by machine.")
@click.option(
    "--slots-per-machine", type=click.IntRange(min=1), help="For the table of ranks; default: all are on one."
)
@click.option("--json", "as_json", is_flag=True, help="Only the plain configuration, or the plain ranks.")
def render(
    config: Path,
    context_dir: Path,
    slots: int | None,
    overrides: tuple[str, ...],
    accelerator: str | None,
    only_ranks: bool,
    slots_per_machine: int | None,
    as_json: bool,
) -> None:
    """Show the exact DeepSpeed configuration, with the source of each value, and the ranks on their machines.

    Of a hyperparameter search it shows the middle point, which `det-ds run` trains.
    """
    from determined_ds.config.accelerator import assumed_cuda
    from determined_ds.config.loggers import missing_loggers
    from determined_ds.config.resolve import Where
    from determined_ds.devices import detect_accelerator
    from determined_ds.errors import ConfigError
    from determined_ds.experiment.decide import decide_stated, left_open, read_document
    from determined_ds.experiment.experiment import parse_experiment

    document = read_document(config, context_dir, slots=slots, overrides=overrides, command="render")
    experiment = parse_experiment(document)
    devices = assumed_cuda(experiment.slots) if accelerator == "cuda" else detect_accelerator(accelerator)
    point = experiment.hyperparameters
    resolved = decide_stated(experiment, point, Where(context_dir=context_dir, accelerator=devices))
    if resolved is None:
        raise ConfigError(left_open(experiment))
    for warning in (*resolved.warnings, *missing_loggers(point)):
        click.echo(f"{click.style('warning', fg='yellow')}: {warning}", err=True)
    layout, machine = resolved.topology, slots_per_machine or experiment.slots
    if as_json:
        places = [_place(layout, rank, machine) for rank in range(layout.slots)]
        click.echo(json.dumps(places if only_ranks else resolved.ds_config, indent=2))
        return
    if only_ranks:
        click.echo("\n".join(_machines(layout, machine)))
        return
    slot_word = "slot" if experiment.slots == 1 else "slots"
    click.echo(_dim(f"# {experiment.name}: {experiment.slots} {slot_word} on {devices.name}"))
    if experiment.searched:
        click.echo(_dim(f"# one point of a search over {', '.join(experiment.searched)}"))
    lines = list(_lines(resolved.ds_config, (), dict(resolved.origins)))
    width = max((len(text) for text, _ in lines if len(text) <= WIDEST), default=0)
    for text, origin in lines:
        padded = _coloured(text) + " " * (width - len(text)) if origin else _coloured(text)
        click.echo(f"{padded}  {_dim('# ' + origin)}" if origin else padded)
    if experiment.slots > 1:
        click.echo("\n".join(_dim(f"# {line}") for line in _machines(layout, machine)))


def _place(layout: Topology, rank: int, slots_per_machine: int) -> dict[str, int]:
    machine, slot = divmod(rank, slots_per_machine)
    return {"rank": rank, "machine": machine, "slot": slot, **layout.coordinates(rank)}


def _machines(layout: Topology, slots_per_machine: int) -> Iterator[str]:
    """A line a machine, a column a slot: where each rank stands on every axis that is divided."""
    axes = [name for name in ("pipe", "sequence", "model", "data") if layout.axes[name] > 1] or ["data"]
    cells = [
        " ".join(f"{name} {layout.coordinates(rank)[name]}" for name in axes) for rank in range(layout.slots)
    ]
    width = max(len(cell) for cell in cells)
    for first in range(0, layout.slots, slots_per_machine):
        own = cells[first : first + slots_per_machine]
        machine = f"machine {first // slots_per_machine}"
        yield f"{machine:<12}" + " | ".join(cell.ljust(width) for cell in own).rstrip()


Line = tuple[str, str]


def _lines(data: dict[str, Any], path: tuple[str, ...], origins: dict[str, str]) -> Iterator[Line]:
    """The mapping as indented JSON, a leaf a line, with the origin of each leaf."""
    if not path:
        yield "{", ""
    for number, (key, value) in enumerate(data.items(), 1):
        here = (*path, key)
        indent, comma = "  " * len(here), "," if number < len(data) else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{json.dumps(key)}: {{", ""
            yield from _lines(value, here, origins)
            yield f"{indent}}}{comma}", ""
        else:
            yield f"{indent}{json.dumps(key)}: {json.dumps(value)}{comma}", origins.get(".".join(here), "")
    if not path:
        yield "}", ""


def _coloured(line: str) -> str:
    """A line of JSON with its key and its value in colours; click drops them where there is no terminal."""
    key, colon, value = line.partition('": ')
    if not colon:
        return line
    return (
        click.style(f'{key}"', fg="cyan") + ": " + (value if value == "{" else click.style(value, fg="green"))
    )


def _dim(text: str) -> str:
    return click.style(text, dim=True)
