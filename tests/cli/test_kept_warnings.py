"""What the ranks of a run warn of is shown as before, kept in its directory, and on its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.cli.own_runs import OWN_SCRIPT
from tests.harness.command import det_ds

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
    entrypoint = "entrypoint=python3 -m determined.launch.deepspeed python3 warns.py"
    words = [folder / "experiment.yaml", folder, "--run-dir", folder / "run", "--set", entrypoint]
    done = det_ds("run", *words)
    assert done.returncode == 0, done.stderr
    assert "UserWarning: a slow loader" in done.stderr
    assert "rank 0 lost batch 4" in done.stderr
    assert "rank 1 lost batch 4" in (folder / "run/logs/rank1.log").read_text()
    kept = [
        json.loads(line)
        for rank in (0, 1)
        for line in (folder / f"run/logs/warnings-rank{rank}.jsonl").read_text().splitlines()
    ]
    assert sum(each["count"] for each in kept if each["message"] == "a slow loader") == 2
    lost = [each for each in kept if "lost batch" in each["message"]]
    assert sum(each["count"] for each in lost) == 10
    assert {(each["level"], each["source"]) for each in lost} == {("ERROR", "data")}
    assert CliRunner().invoke(main, ["report", str(folder / "run")]).exit_code == 0
    assert "a slow loader" in (folder / "run" / "report.html").read_text()
