"""``det-ds checkpoint diff``: the first tensor that differs between two checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from determined_ds.cli.checkpoint.common import (
    EXIT_FOUND,
    columns,
    json_option,
    one_checkpoint,
    run_dir_option,
)

if TYPE_CHECKING:
    from determined_ds.checkpoint.first_difference import TensorDifference

MOST_SHOWN = 20


@click.command()
@click.argument("first")
@click.argument("second")
@run_dir_option
@click.option(
    "--weights", "weights_only", is_flag=True, help="Compare weights alone, not the optimizer's states."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    help="The largest absolute difference of two elements that are equal.  [default: 0]",
)
@json_option
def diff(
    first: str, second: str, run_dir: Path | None, weights_only: bool, tolerance: float, as_json: bool
) -> None:
    """Find the first tensor that differs between two checkpoints, whichever ranks and strategies wrote them.

    Exit code: 0 all tensors are equal, 1 one differs, 2 there is no such checkpoint.
    """
    from determined_ds.checkpoint.first_difference import differences, knows_optimizers

    paths = (one_checkpoint(first, run_dir, key="FIRST"), one_checkpoint(second, run_dir, key="SECOND"))
    weights_only = weights_only or not all(map(knows_optimizers, paths))
    found = list(differences(*paths, weights_only=weights_only, tolerance=tolerance))
    compared = "weights" if weights_only else "tensors"
    if as_json:
        import dataclasses

        from determined_ds.protocol.metrics_file import jsonable

        shown = [jsonable(dataclasses.asdict(each)) for each in found]
        click.echo(
            json.dumps(
                {"version": 1, "compared": compared, "equal": not found, "differences": shown}, indent=2
            )
        )
    else:
        _show_differences(paths, found, compared, tolerance)
    sys.exit(EXIT_FOUND if found else 0)


def _show_differences(
    paths: tuple[Path, Path], found: list[TensorDifference], compared: str, tolerance: float
) -> None:
    from determined_ds.protocol.checkpoint_files import checkpoint_at
    from determined_ds.protocol.handed_on import count
    from determined_ds.protocol.run_dir import short

    for name, path in zip(("first", "second"), paths, strict=True):
        click.echo(f"{name:<7} batch {checkpoint_at(path).steps_completed}, {short(path)}")
    if compared == "weights":
        click.echo("weights alone are compared, not the optimizer's states")
    within = f" within {tolerance:g}" if tolerance else ""
    if not found:
        click.echo(click.style(f"all {compared} are equal{within}", fg="green"))
        return
    tensors = {(each.engine, each.tensor) for each in found}
    click.echo(click.style(f"{count(len(tensors), 'tensor')} with differences", fg="red") + "; the first:")
    rows = [_difference_row(each) for each in found[:MOST_SHOWN]]
    heads = ("tensor", "state", "what differs", "at", "values", "largest")
    click.echo("\n".join(columns(heads, rows, below=(2, 4))))
    if len(found) > MOST_SHOWN:
        click.echo(f"  ... and {len(found) - MOST_SHOWN} more; --json lists all")


def _difference_row(each: TensorDifference) -> tuple[str, ...]:
    place = "" if each.place is None else f"[{', '.join(map(str, each.place))}]"
    values = "" if each.values is None else f"{each.values[0]:.8g} / {each.values[1]:.8g}"
    largest = "" if each.largest is None else f"{each.largest:.3g}"
    name = f"{each.engine} {each.tensor}".rstrip()
    return name, each.state, each.message, place, values, largest
