"""What the ranks of a run warn of is shown as before, kept in its directory, and on its page."""

from __future__ import annotations

import shutil
from pathlib import Path

from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.protocol.kept_warnings import read_warnings
from determined_ds.protocol.run_dir import RunDir
from tests.cli.test_scripts import OWN_SCRIPT, words
from tests.command import det_ds
from tests.report.test_page import Page

WARNS = """
import logging, os, runpy, warnings
warnings.warn("a slow loader")
for batch in range(5):
    logging.getLogger("data").error("rank %s lost batch %d", os.environ["RANK"], batch)
runpy.run_path("train.py", run_name="__main__")
"""


def test_of_two_ranks(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OWN_SCRIPT, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))
    (folder / "warns.py").write_text(WARNS)
    done = det_ds(*words(folder, "warns.py"))
    assert done.returncode == 0, done.stderr
    assert "UserWarning: a slow loader" in done.stderr
    assert "rank 0 lost batch 4" in done.stderr
    assert "rank 1 lost batch 4" in RunDir(folder / "run").log(1).read_text()
    found = {each.message: each for each in read_warnings(RunDir(folder / "run"))}
    (lost,) = (each for text, each in found.items() if "lost batch 0" in text)
    assert (found["a slow loader"].count, found["a slow loader"].ranks) == (2, (0, 1))
    assert (lost.count, lost.ranks, lost.level, lost.source) == (10, (0, 1), "ERROR", "data")
    assert CliRunner().invoke(main, ["report", str(folder / "run")]).exit_code == 0
    rows = Page((folder / "run" / "report.html").read_text()).rows
    assert [row[1:] for row in rows if row[0].startswith("a slow loader")] == [["2", "the start", "0, 1"]]
