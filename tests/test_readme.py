"""What the README tells a newcomer to type."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("data", ["torch's DataLoader", "stream"])
def test_your_own_model_on_other_data_resumes_where_it_stopped(
    data: str, tmp_path: Path, metrics_of: Callable[[Path, str], list[dict[str, Any]]]
) -> None:
    """The same trial with torch's own loader, shuffled, or with the stream that stands there."""
    folder = tmp_path / "model_defs" / "mine"
    folder.mkdir(parents=True)
    trial, experiment = block("model_defs/mine/trial.py"), block("experiments/mine.yaml")
    if data == "stream":
        (folder / "streaming.py").write_text(block("model_defs/mine/streaming.py"))
        experiment = experiment.replace("mine.trial:MyTrial", "mine.streaming:MyStreamingTrial")
    else:
        trial = trial.replace(
            "self.training_loader(self.data)",
            "torch.utils.data.DataLoader(self.data, batch_size=self.micro_batch_size, shuffle=True)",
        )
    (folder / "trial.py").write_text(trial)
    shutil.copytree(ROOT / "experiments" / "deepspeed", tmp_path / "experiments" / "deepspeed")
    config = tmp_path / "experiments" / "mine.yaml"
    config.write_text(experiment.replace("{epochs: 3}", "{batches: 40}"))

    def run(folder: str, *options: str) -> Any:
        done = det_ds("run", config, tmp_path, "--run-dir", tmp_path / folder, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "test passed" in run("test", "--test")
    run("whole")
    run("stopped", "--set", "hyperparameters.fit.max_length.batches=33")
    assert ("skipping" in run("stopped", "--resume")) == (data == "stream")
    last = [metrics_of(tmp_path / folder, "validation")[-1] for folder in ("whole", "stopped")]
    assert last[0]["validation_loss"] == last[1]["validation_loss"]


def test_every_file_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
