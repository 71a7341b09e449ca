"""A run without a cluster, reported to a master by the real ``core_v2``: the numbers of its run directory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds.launch.deleted_in_master import report_deleted
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.runtime.master import unmanaged as master_report
from tests.cli.conftest import OWN_MODEL
from tests.cluster.master import Master
from tests.command import ROOT, det_ds, det_ds_program
from tests.transformers.test_resume import experiment as of_transformers

# One rank of torchrun's; another launcher's is the same from there on.
RANK = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
LENGTH = "hyperparameters.fit.max_length.batches"


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master(storage={}, check=lambda config, _: ([], config))
    yield made
    made.close()
    assert not made.server.errors, made.server.errors


LONG = pytest.mark.long("another kind of script; core is the short one")


def run(run_dir: Path, master: str, *words: str, env: dict[str, str]) -> Any:
    home = {"HOME": str(run_dir.parent)}  # core_v2 keeps who is logged in there
    config = OWN_MODEL / "experiment.yaml"
    environment = {**env, **home, "DET_MASTER": master}
    start = det_ds_program if env else det_ds  # a rank starts itself anew, as a program
    return start("run", config, OWN_MODEL, "--run-dir", run_dir, *words, env=environment)


def told(run_dir: Path) -> list[tuple[str, int, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sorted((record["group"], record["steps_completed"], record["metrics"]) for record in records)


def test_a_rank_of_a_launcher_reports_its_run_and_a_resumed_one_goes_on_there(
    master: Master, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = run(run_dir, master.server.url, "--set", f"{LENGTH}=4", env=RANK)
    assert first.returncode == 0, first.stderr
    assert f"reported to {master.server.url}/det/experiments/1" in first.stdout
    [trial] = master.trials.values()
    assert trial.state == "COMPLETED"
    again = run(run_dir, master.server.url, "--set", f"{LENGTH}=6", "--resume", env=RANK)
    assert again.returncode == 0, again.stderr
    assert list(master.trials.values()) == [trial]
    assert (trial.state, trial.run_id, trial.progress) == ("COMPLETED", 2, 1.0)

    seen = [(report.group, report.steps, report.metrics) for report in trial.reports if not report.archived]
    assert sorted(seen, key=lambda each: each[:2]) == told(run_dir)
    there = {
        checkpoint.uuid: checkpoint.steps_completed for checkpoint in checkpoints_in(run_dir / "checkpoints")
    }
    assert {
        uuid: found.steps for uuid, found in master.checkpoints.items()
    } == there  # and no folder beside them
    experiment = master.experiments[1]
    assert experiment.name == "tiny"
    assert experiment.searcher["metric"] == "validation_loss"
    assert trial.hparams["global_batch_size"] == 8


def test_what_is_deleted_at_its_end_is_deleted_for_the_master_too(master: Master, tmp_path: Path) -> None:
    run_dir, period = tmp_path / "run", "hyperparameters.fit.checkpoint_period.batches=1"
    pruned = ["--set", "checkpoint_storage.save_trial_best=0", "--set", period, "--set", f"{LENGTH}=4"]
    done = run(run_dir, master.server.url, "--report-to-master", *pruned, env={})
    assert done.returncode == 0, done.stderr
    assert "the master still lists" not in done.stderr
    deleted = {each["uuid"] for each in json.loads((run_dir / "result.json").read_text())["deleted"]}
    assert deleted
    assert {uuid for uuid, found in master.checkpoints.items() if found.state == "DELETED"} == deleted
    assert {
        found.uuid for found in checkpoints_in(run_dir / "checkpoints")
    } == master.checkpoints.keys() - deleted


def test_a_master_that_is_gone_by_then_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("DET_MASTER", f"http://127.0.0.1:{silent.getsockname()[1]}")
        report_deleted(["one"], wait_s=0.2)
    assert (
        capsys.readouterr().err
        == "warning: the master still lists the deleted checkpoints: no answer within 0 s\n"
    )


def test_a_master_that_cannot_be_reached_is_one_warning(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "http://127.0.0.1:1", "--set", f"{LENGTH}=2", env=RANK)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not reported to the master") == 1
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_a_master_that_never_answers_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(master_report, "LAST_S", 0.2)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DET_MASTER", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with master_report.reported(tmp_path, {"name": "tiny"}, {}) as report:
            for step in range(5000):  # more than any queue of core_v2's holds
                report.metrics("training", step, {"loss": 1.0})
    assert "has not taken all reports" in caplog.text


def test_our_own_launcher_reports_where_it_is_asked_to(master: Master, tmp_path: Path) -> None:
    words = ["--set", f"{LENGTH}=2", "--slots", "1"]
    assert run(tmp_path / "quiet", master.server.url, *words, env={}).returncode == 0
    assert not master.trials
    assert run(tmp_path / "run", master.server.url, "--report-to-master", *words, env={}).returncode == 0
    [trial] = master.trials.values()
    assert trial.state == "COMPLETED"
    nowhere = det_ds(
        "run", OWN_MODEL / "experiment.yaml", OWN_MODEL, "--report-to-master", env={"DET_MASTER": ""}
    )
    assert nowhere.returncode == 2
    assert "DET_MASTER is not set" in nowhere.stderr


@pytest.mark.parametrize(
    "kind", ["core", pytest.param("session", marks=LONG), pytest.param("transformers", marks=LONG)]
)
def test_a_script_is_reported_though_it_finds_the_trial_of_a_cluster(
    kind: str, master: Master, tmp_path: Path
) -> None:
    config, code = {
        "core": (ROOT / "tests/cli/own_script/experiment.yaml", ROOT / "tests/cli/own_script"),
        "session": (ROOT / "tests/session/scripts/cifar10.yaml", ROOT / "tests/session/scripts"),
        "transformers": (tmp_path / "victim.yaml", ROOT),
    }[kind]
    (tmp_path / "victim.yaml").write_text(yaml.safe_dump(of_transformers(zero_stage=1)))
    run_dir = tmp_path / "run"
    environment = {"HOME": str(tmp_path), "DET_MASTER": master.server.url}
    done = det_ds("run", config, code, "--run-dir", run_dir, "--report-to-master", env=environment)
    assert done.returncode == 0, done.stderr
    assert "is not reported" not in done.stderr
    [trial] = master.trials.values()
    assert (trial.state, trial.progress) == ("COMPLETED", 1.0)
    seen = [(report.group, report.steps, report.metrics) for report in trial.reports if not report.archived]
    assert sorted(seen, key=lambda each: each[:2]) == told(run_dir)
    there = checkpoints_in(run_dir / "checkpoints")
    assert {uuid: found.steps for uuid, found in master.checkpoints.items()} == {
        checkpoint.uuid: checkpoint.steps_completed for checkpoint in there
    }
