"""``det-ds checkpoint prune``: delete the oldest checkpoints of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from determined_ds.cli.checkpoint.common import EXIT_FOUND, as_json_of, json_option, line_of

if TYPE_CHECKING:
    from determined_ds.checkpoint.pruning import Pruning


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    help="How many remain, the best and the newest among them.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(run_dir: Path, keep: int, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete the oldest checkpoints of RUN_DIR, never the best nor the newest intact one; damaged newer ones first."""
    from determined_ds.checkpoint.pruning import plan_pruning, remove
    from determined_ds.protocol.links import relink
    from determined_ds.protocol.run_dir import RunDir
    from determined_ds.protocol.run_lock import RunLock

    if as_json and not (dry_run or yes):
        raise click.UsageError("--json needs --yes or --dry-run: it asks nothing.")
    planned = plan_pruning(run_dir, keep)
    if dry_run:
        _show_pruning(planned, as_json=as_json, dry_run=True)
        return
    with RunLock(run_dir):
        planned = plan_pruning(run_dir, keep)
        if not as_json:
            _show_pruning(planned, as_json=False)
        count = len(planned.removed)
        if count and not yes and not click.confirm(f"delete {count} of them?", err=True):
            sys.exit(EXIT_FOUND)
        for each in planned.removed:
            remove(each)
        relink(RunDir(run_dir))
        if as_json:
            _show_pruning(planned, as_json=True)


def _show_pruning(planned: Pruning, *, as_json: bool, dry_run: bool = False) -> None:
    from determined_ds.checkpoint.verifying import bytes_in
    from determined_ds.memory.units import format_bytes

    every = sorted((*planned.kept, *planned.removed), key=lambda each: -each.steps_completed)
    sizes = {each.uuid: bytes_in(each.path) if each.path.is_dir() else 0 for each in every}
    if as_json:
        lists = {"kept": planned.kept, "removed": planned.removed}
        shown = {name: [as_json_of(each) for each in found] for name, found in lists.items()}
        about = {"version": 1, "dry_run": dry_run, "damages": list(planned.damages)}
        click.echo(json.dumps({**about, **shown}, indent=2))
        return
    for damage in planned.damages:
        click.echo(f"warning: {damage}", err=True)
    for each in every:
        notes = [note for note, one in (("best", planned.best), ("newest", planned.newest)) if each == one]
        state = click.style("delete", fg="red") if each in planned.removed else "keep  "
        click.echo(
            f"{state} {line_of(each)}  {format_bytes(sizes[each.uuid]):>8}  {', '.join(notes)}".rstrip()
        )
    freed = sum(sizes[each.uuid] for each in planned.removed)
    click.echo(f"{len(planned.removed)} of {len(every)} to delete, {format_bytes(freed)}")
