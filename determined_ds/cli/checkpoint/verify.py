"""``det-ds checkpoint verify``: every file of checkpoints against their manifests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.checkpoint.byte_bar import byte_bar
from determined_ds.cli.checkpoint.common import (
    EXIT_FOUND,
    as_json_of,
    json_option,
    line_of,
    located,
    one_checkpoint,
    run_dir_option,
)

if TYPE_CHECKING:
    from determined_ds.checkpoint.verifying import Verified

COLOURS = {"intact": "green", "damaged": "red", "unverified": "yellow"}


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@run_dir_option
@json_option
def verify(paths: tuple[str, ...], run_dir: Path | None, as_json: bool) -> None:
    """Read every file and compare it with the checkpoint's manifest; of a run directory, all of its checkpoints.

    Exit code: 0 no file is damaged, 1 one is, 2 there is no such checkpoint.
    """
    from determined_ds.checkpoint.verifying import DAMAGED, all_at, bytes_in, verify
    from determined_ds.protocol.checkpoint_files import checkpoint_at

    found = [_given(given, run_dir) for given in paths]
    every = [each for path in found for each in (all_at(path) or [checkpoint_at(path)])]
    verified = []
    for each in every:
        with byte_bar(bytes_in(each.path), each.uuid, hidden=as_json) as read:
            answer = verify(each, read=read)
        if not each.path.is_dir():  # a run that is writing has deleted it meanwhile
            continue
        verified.append(answer)
        if not as_json:
            _show_verified(answer)
    if as_json:
        click.echo(
            json.dumps({"version": 1, "checkpoints": [_verified_json(each) for each in verified]}, indent=2)
        )
    sys.exit(EXIT_FOUND if any(each.state == DAMAGED for each in verified) else 0)


def _given(given: str, run_dir: Path | None) -> Path:
    """A checkpoint, or a run directory that has some."""
    path = located(given, run_dir)
    one_checkpoint(str(path), None)
    return one_checkpoint(given, run_dir) if given == "last" and run_dir is not None else path


def _show_verified(verified: Verified) -> None:
    from determined_ds.memory.units import format_bytes

    state = click.style(f"{verified.state:<10}", fg=COLOURS[verified.state])
    size = f"{verified.num_files} files, {format_bytes(verified.num_bytes)}"
    click.echo(f"{state} {line_of(verified.checkpoint)}  {size}")
    for damage in verified.damages:
        click.echo(f"           {damage}")


def _verified_json(verified: Verified) -> dict[str, Any]:
    return {
        **as_json_of(verified.checkpoint),
        "state": verified.state,
        "damages": list(verified.damages),
        "files": verified.num_files,
        "bytes": verified.num_bytes,
    }
