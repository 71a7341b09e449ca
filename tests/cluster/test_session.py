"""A plain script with a session, sent to a cluster as it is: paused and activated, it ends as by ``det-ds run``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, alike
from tests.command import ROOT, det_ds

pytestmark = pytest.mark.programs
SCRIPTS = ROOT / "tests/session/scripts"
SENT = ("determined_ds", "setup.cfg", "pyproject.toml", "constraints.txt", "startup-hook.sh", "README.md")
EVERY_STEP = ("hyperparameters.fit.reporting_period.batches=1", "reproducibility.experiment_seed=7")


def context_of(folder: Path) -> Path:
    """A context directory with the library, as much of it as is sent, and the script."""
    folder.mkdir()
    for name in SENT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    for name in ("cifar10_ported.py", "cifar10.yaml"):
        shutil.copy(SCRIPTS / name, folder)
    (folder / ".detignore").write_text(
        (ROOT / ".detignore").read_text().replace("/*\n", "/*\n!/*.py\n!/*.yaml\n", 1)
    )
    return folder


def test_paused_and_activated_it_ends_as_here(cluster: Cluster, tmp_path: Path) -> None:
    context = context_of(tmp_path / "context")
    number = cluster.create(context / "cifar10.yaml", *EVERY_STEP, context=context, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 2)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    assert trial.state == "PAUSED"
    assert trial.allocations[0].exit_code == 0
    assert trial.allocations[0].acked
    assert 2 <= cluster.checkpoints(trial)[-1].steps < 10
    cluster.activate(number)
    cluster.wait(number)
    assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 0)

    words = [word for override in EVERY_STEP for word in ("--set", override)]
    here = det_ds("run", SCRIPTS / "cifar10.yaml", SCRIPTS, "--run-dir", tmp_path / "here", *words)
    assert here.returncode == 0, here.stderr
    lines = [json.loads(line) for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    for group in ("training", "validation"):
        expected = [(x["steps_completed"], alike(x["metrics"])) for x in lines if x["group"] == group]
        assert cluster.metrics(trial, group) == expected
