"""A run without a cluster, reported to a master by the real ``core_v2``: the numbers of its run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.master import Master, still_master
from tests.harness.command import ROOT, det_ds, det_ds_program
from tests.package import checkpoints, records

OWN_MODEL, OWN_SCRIPT = ROOT / "tests/cli/own_model", ROOT / "tests/cli/own_script"
# One rank of torchrun's; another launcher's is the same from there on.
ONE = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT"), "1")
RANK = {**ONE, **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"), "MASTER_ADDR": "127.0.0.1"}
RANK["TORCHELASTIC_RUN_ID"] = "none"


@pytest.fixture
def master() -> Iterator[Master]:
    with still_master() as made:
        yield made


def run(run_dir: Path, master: str, length: int, *words: str, folder: Path = OWN_MODEL, **env: str) -> Any:
    """On one slot, with ``length`` 0 as long as it says; who is logged in is kept in ``HOME``."""
    start = det_ds_program if env else det_ds  # a rank starts itself anew, as a program
    [config] = folder.glob("*.yaml")
    sets = ["--set", f"hyperparameters.fit.max_length.batches={length}"] if length else []
    sets += ["--slots", "1"] if length and not env else []
    env |= {"HOME": str(run_dir.parent), "DET_MASTER": master}
    return start("run", config, folder, "--run-dir", run_dir, *sets, *words, env=env)


def assert_all_is_told(master: Master, run_dir: Path) -> None:
    """Of the only trial: the metrics of its run directory, and its checkpoints, with no folder beside them."""
    [trial] = master.trials.values()
    assert (trial.state, trial.progress) == ("COMPLETED", 1.0)
    for group in ("training", "validation"):
        assert [(each.steps, each.metrics) for each in trial.of_group(group)] == records(run_dir, group)
    assert {found.uuid for found in trial.complete} == {found.name for found in checkpoints(run_dir)}


def test_a_run_is_reported_and_a_rank_of_a_launcher_that_resumes_it_goes_on_there(
    master: Master, tmp_path: Path
) -> None:
    run_dir, url = tmp_path / "run", master.server.url
    first = run(run_dir, url, 4, "--report-to-master")
    assert first.returncode == 0, first.stderr
    assert f"reported to {url}/det/experiments/1" in first.stdout
    again = run(run_dir, url, 6, "--resume", **RANK)
    assert again.returncode == 0, again.stderr
    assert_all_is_told(master, run_dir)
    [trial] = master.trials.values()
    assert (trial.run_id, trial.hparams["global_batch_size"]) == (2, 8)
    assert master.experiments[1].config["name"] == "tiny"


def test_it_is_reported_only_where_asked_for_and_a_master_that_is_away_is_one_warning(
    master: Master, tmp_path: Path
) -> None:
    assert run(tmp_path / "quiet", master.server.url, 2).returncode == 0
    assert not master.trials
    nowhere = run(tmp_path / "nowhere", "", 2, "--report-to-master")
    assert nowhere.returncode == 2
    assert "DET_MASTER is not set" in nowhere.stderr
    done = run(tmp_path / "run", "http://127.0.0.1:1", 2, "--report-to-master")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not reported to the master") == 1
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
