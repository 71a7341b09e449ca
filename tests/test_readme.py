"""What the README tells a newcomer to type."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.command import ROOT, det_ds

README = (ROOT / "README.md").read_text()


def block(first_line: str) -> str:
    """The README's code block whose first line is a comment with this file name."""
    found = re.search(rf"```\w+\n# {re.escape(first_line)}\n(.*?)```", README, re.DOTALL)
    assert found, first_line
    return found[1]


def test_your_own_model_is_under_forty_lines_and_runs(tmp_path: Path) -> None:
    """The trial and the YAML as they stand there, beside a JSON of ours; and on a machine without a compiler."""
    trial, experiment = block("model_defs/mine/trial.py"), block("experiments/mine.yaml")
    assert len((trial + experiment).strip().splitlines()) < 40
    (tmp_path / "model_defs" / "mine").mkdir(parents=True)
    (tmp_path / "model_defs" / "mine" / "trial.py").write_text(trial)
    shutil.copytree(ROOT / "experiments" / "deepspeed", tmp_path / "experiments" / "deepspeed")
    (tmp_path / "experiments" / "mine.yaml").write_text(experiment)
    done = det_ds(
        *("run", "experiments/mine.yaml", ".", "--test", "--run-dir", tmp_path / "run"),
        cwd=tmp_path,
        env={"PATH": "/nowhere"},
    )
    assert done.returncode == 0, done.stderr
    assert "test passed" in done.stdout


def test_every_file_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
