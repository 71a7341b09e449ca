"""What the commands of ``det-ds checkpoint`` share: which checkpoint is meant, and how rows are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from determined_ds.protocol.checkpoint_files import Checkpoint

EXIT_FOUND = 1  # something is damaged, or differs

run_dir_option = click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Of best, last, or a uuid given as PATH."
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


def located(given: str, run_dir: Path | None, *, key: str = "PATH") -> Path:
    """The folder that PATH means: of a checkpoint, or a run directory.

    Raises:
        ConfigError: there is none.
    """
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.protocol.named_checkpoint import FORM, NotFound, locate
    from determined_ds.protocol.run_dir import RunDir

    try:
        return locate(given, None if run_dir is None else RunDir(run_dir)).resolve()
    except NotFound as error:
        problem = Problem(key=key, value=given, message=str(error), fix=FORM, code="no-checkpoint")
        raise ConfigError(problem) from None


def one_checkpoint(given: str, run_dir: Path | None, *, key: str = "PATH") -> Path:
    """The folder of the checkpoint that PATH means: a run directory's newest; it may be damaged.

    Raises:
        ConfigError: there is none.
    """
    from determined_ds.checkpoint.verifying import all_at
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.protocol.named_checkpoint import FORM, is_checkpoint

    path = located(given, run_dir, key=key)
    if is_checkpoint(path):
        return path
    if not (found := all_at(path)):
        problem = Problem(key=key, value=given, message="holds no checkpoint", fix=FORM, code="no-checkpoint")
        raise ConfigError(problem)
    return found[0].path


def line_of(checkpoint: Checkpoint) -> str:
    """Uuid and batch, for a list."""
    return f"{checkpoint.uuid}  batch {checkpoint.steps_completed:<7}"


def as_json_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same for programs."""
    return {
        "uuid": checkpoint.uuid,
        "path": str(checkpoint.path),
        "steps_completed": checkpoint.steps_completed,
    }


def columns(
    heads: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    right: tuple[int, ...] = (),
    below: tuple[int, ...] = (),
) -> list[str]:
    """Rows with aligned columns that fit the terminal; plain text, as tens of thousands of tensors are shown at once.

    Args:
        heads: Of the columns.
        rows: Their cells; the first one is the name, which stands above its row where it is too long.
        right: Columns that are aligned right.
        below: Columns that stand below their rows where there is no room.
    """
    from determined_ds.report.fitted import FittedColumn, FittedRow, fitted, plain, terminal_width

    table = [
        FittedColumn(
            head=(head,),
            align="right" if at in right else "left",
            no_room="above" if at == 0 else "below" if at in below else "keep",
        )
        for at, head in enumerate(heads)
    ]
    found = [FittedRow(cells=[(cell,) for cell in row]) for row in rows]
    lines = [f"  {plain(line)}" for line in fitted(table, found, terminal_width() - 2)]
    return [click.style(lines[0], bold=True), *lines[1:]]
