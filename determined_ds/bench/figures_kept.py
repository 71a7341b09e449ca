"""What was measured is kept: merged into the machine's file, and drawn in the run directory."""

from __future__ import annotations

from pathlib import Path

from determined_ds.bench.charts import picture_of
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.machine_file import (
    LOCATION,
    NAME,
    MachineFigures,
    figures_of,
    machine_path,
    write_machine,
)
from determined_ds.protocol.run_dir import check_writable


def check_kept(path: Path) -> None:
    """Check that the machine's file can be written, before anything is measured.

    Raises:
        ConfigError: it cannot.
    """
    try:
        check_writable(path.parent)
    except ConfigError as error:
        message, fix = error.problems[0].message, f"export {LOCATION}=FILE to keep the figures elsewhere"
        raise ConfigError(
            Problem(key="", origin=str(path), message=message, fix=fix, code="machine-file")
        ) from None


def keep(measured: MachineFigures, run_dir: Path) -> tuple[Path, str]:
    """Merge what was measured into the machine's file; in the run directory, write it alone, and a picture of it.

    Args:
        measured: Of one kind.
        run_dir: Of the measurement.

    Returns:
        The machine's file, and a note where what was in it is replaced and not merged; "" elsewhere.

    Raises:
        ConfigError: a file cannot be written.
    """
    path = machine_path(measured.hardware)
    there = figures_of(measured.hardware, path)
    write_machine(path, measured if there.machine is None else there.machine.merged(measured))
    write_machine(run_dir / NAME, measured)
    [signed] = measured.measured
    picture = picture_of(measured, signed.bench)
    if picture is not None:
        write_whole(run_dir / f"{signed.bench}.png", picture)
    return path, there.note and f"replaced, since it was {there.note}"
