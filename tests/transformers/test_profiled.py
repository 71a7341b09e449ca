"""``fit.profile`` of a script of transformers: it trains as ever, and what it evaluates and saves is in no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from determined_ds.profile.analysis import analyse
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.profile_files import traces_in
from determined_ds.protocol.run_dir import RunDir
from tests.command import ROOT, det_ds
from tests.recorded_steps import assert_adds_up
from tests.transformers.test_resume import experiment


def losses(folder: Path, **fit: Any) -> list[float]:
    config = experiment(1)
    config["hyperparameters"]["fit"].update({"reporting_period": {"batches": 1}, **fit})
    folder.mkdir()
    path = folder / "victim.yaml"
    path.write_text(yaml.safe_dump(config))
    done = det_ds("run", path, ROOT, "--run-dir", folder / "run")
    assert done.returncode == 0, done.stderr
    return [each["metrics"]["loss"] for each in read_records(RunDir(folder / "run").metrics, "training")]


def test_its_losses_stay_the_same_and_parts_add_up(tmp_path: Path) -> None:
    found = losses(tmp_path / "profiled", profile={"wait": 1, "warmup": 1, "active": 4})
    assert found == losses(tmp_path / "plain")
    profile = analyse(traces_in(tmp_path / "profiled" / "run"))
    assert (profile.zero_stage, profile.accumulation, profile.global_batch_size) == (1, 2, 8)
    assert_adds_up(profile)
    for rank in profile.ranks:
        assert [step.batch for step in rank.steps] == [3, 4, 5, 6]
        assert all(rank.seconds[part] for part in ("data", "forward", "backward", "optimizer"))
        # Evaluations after batch 4 and a checkpoint after batch 6 take longer than any step.
        assert max(step.total_s for step in rank.steps) < 10 * rank.median_s
