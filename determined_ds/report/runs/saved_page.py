"""``report.html`` of runs: where it goes, and that no file by another program is lost for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.runs.run_view import RunView
from determined_ds.report.runs.runs_page import runs_page
from determined_ds.report.written import PAGE, RESULTS

RUNS_PAGE = "runs.html"  # beside the report of det-ds compare or autotune
MARK = b'<meta name="generator" content="det-ds report">'
HEAD_BYTES = 500


def page_path(folders: Sequence[Path], output: Path | None) -> Path:
    """Where a page goes: as requested, into the one folder that it is of, or into the current folder.

    Raises:
        ConfigError: there is a file that no ``det-ds report`` has written.
    """
    if output is not None:
        path = output / PAGE if output.is_dir() else output
    elif len(folders) == 1:
        path = folders[0] / (RUNS_PAGE if (folders[0] / RESULTS).is_file() else PAGE)
    else:
        path = Path(PAGE)
    if path.is_file() and MARK not in path.read_bytes()[:HEAD_BYTES]:
        message = "exists, and was not written by det-ds report"
        problem = Problem(
            key="--output", value=str(path), message=message, fix="give another --output FILE", code="output"
        )
        raise ConfigError(problem)
    return path


def save_page(runs: Sequence[RunView], path: Path) -> int:
    """Write the page, whole at any moment. Returns its bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    text = runs_page(runs)
    write_files({path: text}, overwrite=True)
    return len(text.encode())
