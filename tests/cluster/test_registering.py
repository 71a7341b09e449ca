"""A checkpoint is exported and registered with its metrics, by Determined's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.cli.conftest import OWN_MODEL
from tests.cluster.master import Master
from tests.command import det_ds

LENGTH = "hyperparameters.fit.max_length.batches=2"


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    made = Master(storage={}, check=lambda config, _: ([], config))
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps who is logged in there
    monkeypatch.setenv("DET_MASTER", made.server.url)
    yield made
    made.close()
    assert not made.server.errors, made.server.errors


def exported(run_dir: Path, *words: str) -> Any:
    given = ["checkpoint", "export", str(run_dir), "--to", "safetensors", *words]
    return CliRunner().invoke(main, given)


def test_a_version_has_the_metrics_and_where_it_was_exported_to(master: Master, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = ["--set", LENGTH, "--report-to-master", "--run-dir", run_dir]
    done = det_ds(
        "run", OWN_MODEL / "experiment.yaml", OWN_MODEL, *words, env={"DET_MASTER": master.server.url}
    )
    assert done.returncode == 0, done.stderr
    uuid = checkpoints_in(run_dir / "checkpoints")[0].uuid
    register = ("--register", "tiny", "--version-notes", "the first")
    done = exported(run_dir, *register, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "registered as version 1 of model tiny" in done.output
    [version] = master.registry.versions["tiny"]
    assert (version["uuid"], version["notes"]) == (uuid, "the first")
    metadata = version["metadata"]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [validation] = [each["metrics"] for each in records if each["group"] == "validation"]
    assert metadata["validation_loss"] == validation["validation_loss"]
    assert (metadata["steps_completed"], metadata["exported_to"]) == (2, str(out))
    done = exported(run_dir, *register, "--out", str(out), "--force", "--json")
    assert json.loads(done.stdout)["registered"] == {"model": "tiny", "version": 2}


def test_what_the_master_does_not_know_is_refused_before_anything_is_written(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    done = det_ds("run", OWN_MODEL / "experiment.yaml", OWN_MODEL, "--set", LENGTH, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    done = exported(run_dir, "--register", "tiny", "--out", str(out))
    assert done.exit_code == 2
    assert "--register: the master knows no checkpoint " in done.output
    assert "fix: give its uuid on the master by --uuid" in done.output
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:1")
    done = exported(run_dir, "--register", "tiny", "--out", str(out))
    assert done.exit_code == 2
    assert "the master cannot be asked" in done.output
    assert "Traceback" not in done.output
    assert not out.exists()
    assert not master.registry.models
