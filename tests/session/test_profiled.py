"""``fit.profile`` of a script with a session: it trains as ever, and its steps are recorded without its validations."""

from __future__ import annotations

from pathlib import Path

from determined_ds.profile.analysis import analyse
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.profile_files import traces_in
from determined_ds.protocol.run_dir import RunDir
from tests.command import det_ds
from tests.recorded_steps import assert_adds_up

SCRIPTS = Path(__file__).parent / "scripts"
EVERY_BATCH = ("--set", "hyperparameters.fit.reporting_period.batches=1")
PROFILE = "hyperparameters.fit.profile={wait: 2, warmup: 1, active: 4}"


def losses(run_dir: Path, *options: str) -> list[float]:
    done = det_ds("run", SCRIPTS / "cifar10.yaml", SCRIPTS, "--run-dir", run_dir, *EVERY_BATCH, *options)
    assert done.returncode == 0, done.stderr
    return [each["metrics"]["loss"] for each in read_records(RunDir(run_dir).metrics, "training")]


def test_its_losses_stay_the_same_and_parts_add_up(tmp_path: Path) -> None:
    """Over the end of a pass, after which the script validates by itself."""
    assert losses(tmp_path / "profiled", "--set", PROFILE) == losses(tmp_path / "plain")
    profile = analyse(traces_in(tmp_path / "profiled"))
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert_adds_up(profile)
    for rank in profile.ranks:
        assert [step.batch for step in rank.steps] == [4, 5, 6, 7]
        assert all(rank.seconds[part] for part in ("data", "forward", "backward", "optimizer"))
