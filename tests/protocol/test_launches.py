"""What a run records of each start of its ranks, and what is read of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import ConfigError
from determined_ds.protocol.launches import RESUME, Launch, launch_line, launch_of, read_launches
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.recorded_run import read_run
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.run_lock import RunLock

CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)


def _launch(**more: object) -> Launch:
    facts = {"name": "a run", "runs": "m:T", "hyperparameters": {"lr": 0.1}, "slots": 2, "trial_seed": 3}
    return launch_of(**{**facts, "resolved": None, "accelerator": CPU, **more})  # type: ignore[arg-type]


def test_launches_are_read_as_they_were_written(tmp_path: Path) -> None:
    launches = (_launch(), _launch(kind=RESUME, steps_completed=7, checkpoint="u"))
    path = tmp_path / "launches.jsonl"
    path.write_text("".join(map(launch_line, launches)))
    assert read_launches(path) == launches


def test_a_torn_line_and_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    path.write_text('{"time": 1.0, "of_later": 2}\n[1]\n{"time": 2.0, "ki')
    assert read_launches(path) == (Launch(time=1.0),)


def test_secrets_are_masked() -> None:
    launch = _launch(hyperparameters={"api_key": "sk-abcdefghijklmnopqrstuv"})
    assert "sk-abc" not in launch_line(launch)


def test_a_run_that_goes_on_is_running_until_its_lock_is_released(tmp_path: Path) -> None:
    there = RunDir(tmp_path / "run")
    with RunLock(there.path):
        there.experiment.write_text("name: n\n")
        append_record(there.metrics, {"group": "training", "steps_completed": 1, "metrics": {"loss": 2.0}})
        run = read_run(there.path)
        assert run.is_running
        assert run.result is None
    assert run.name == "n"
    assert run.of_group("training")[0]["metrics"] == {"loss": 2.0}
    assert not read_run(there.path).is_running


@pytest.mark.parametrize("made", [True, False])
def test_another_folder_is_refused(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "other"
    if made:
        path.mkdir()
    with pytest.raises(ConfigError, match="not a run directory" if made else "does not exist"):
        read_run(path)
