"""``pipeline_step.json`` of a run directory: what each rank of a pipeline computed when, in a measured step."""

from __future__ import annotations

from pathlib import Path

from determined_ds.documents.files import write_files
from determined_ds.pipe.recording import RecordedStep
from determined_ds.rundir.strict_json import from_json, json_text

KIND = "a step of a pipeline, recorded by determined_ds"
FORMAT = 1


def write_step(step: RecordedStep, path: Path) -> None:
    """Write a step, whole or not at all. A file that is there is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_files({path: json_text(step, kind=KIND, version=FORMAT)}, overwrite=True)


def read_step(path: Path) -> RecordedStep:
    """Read what :func:`write_step` wrote.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is another program's.
    """
    return from_json(RecordedStep, path, kind=KIND, version=FORMAT, file=path.name)
