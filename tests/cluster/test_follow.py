"""A trial of a cluster, created by the real ``det``: followed, paused, killed and restarted, looked at, downloaded.

What is paused or killed and activated ends, to the last digit, as ``det-ds run`` does that never was.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from determined.common.api import bindings

from determined_ds import load_model_from_checkpoint_path
from tests.cluster.cluster import Cluster, FakeCluster, Trial, metrics_of
from tests.cluster.scenarios import (
    CONST,
    LENGTH,
    LONG_ENOUGH,
    ONE_SLOT,
    ONE_THREAD,
    PIPELINE,
    REAL,
    SAVED_EVERY,
    SHORT,
    entrypoint,
    fit,
)
from tests.harness.command import ROOT, TIMEOUT_S
from tests.harness.forked import marked
from tests.package import NO_RESTART_HELPS

SEED = 441365315  # as a real master's database had it


class Followed(NamedTuple):
    """An experiment whose log was followed to its end."""

    number: int
    trial: Trial
    shown: str  # by ``det trial logs -f``
    stopped_at: int  # the batch at which it was paused
    here: Path  # the run directory of the same without a cluster, and never paused


@pytest.fixture(scope="module")
def followed(cluster: Cluster, run_here: Callable[..., Path]) -> Followed:
    """``const.yaml``, cut short; paused at its first report, while its log is followed, and activated."""
    number = cluster.create(CONST, *LONG_ENOUGH, paused=True)
    trial = cluster.trial(number)
    assert (trial.state.name, cluster.starts(trial)) == ("PAUSED", [])
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(cluster.det, "trial", "logs", "-f", trial.id)
        if isinstance(cluster, FakeCluster):
            cluster.inject("answer", "POST", ".*/signals/ack_preemption", status=500)
        stopped_at = cluster.stop(number, at=2)
        cluster.activate(number)
        here = run_here(CONST, *LONG_ENOUGH)
        [trial] = cluster.wait(number)
        return Followed(number, trial, following.result(timeout=60).stdout, stopped_at, here)


@pytest.mark.programs
def test_it_is_followed_and_its_metrics_are_those_of_a_run_here(cluster: Cluster, followed: Followed) -> None:
    trial, here, stopped_at = followed.trial, metrics_of(followed.here), followed.stopped_at
    assert f"stopped     batch {stopped_at} of {LENGTH}, as requested" in followed.shown
    assert f"resumed at batch {stopped_at} of {LENGTH}" in followed.shown
    end = rf"\[rank=0\].* validation  batch {LENGTH}/{LENGTH}  validation_loss [0-9.]+"
    assert re.search(end, followed.shown)
    assert (trial.state.name, trial.restarts, trial.totalBatchesProcessed) == ("COMPLETED", 0, LENGTH)
    assert cluster.experiment(followed.number).progress == 1.0
    assert len(cluster.starts(trial)) == 2
    assert cluster.metrics(trial) == here
    assert {stopped_at, LENGTH} <= {checkpoint.batch for checkpoint in cluster.checkpoints(trial)}
    assert json.loads((followed.here / "result.json").read_text())["trial_seed"] == SEED


@pytest.mark.programs
def test_only_the_chief_talks_to_the_master_and_no_more_than_a_report_asks_for(
    fake: FakeCluster, followed: Followed
) -> None:
    """Determined's ``core.init`` itself tells the master of every rank that starts; nothing else may."""
    kept = fake.kept(followed.trial)
    assert kept.seed == SEED
    assert [allocation.acked for allocation in kept.allocations] == [True, False]
    calls = [each for each in fake.calls(".*", allocation=kept.allocations[1].id) if each.rank is not None]
    of_others = [call for call in calls if call.rank != 0]
    assert [(call.method, call.path) for call in of_others] == [("POST", "/api/v1/runs/start")]
    count = Counter(call.path.split("/")[-1] for call in calls if call.rank == 0)
    rest = range(followed.stopped_at + 1, LENGTH + 1)
    reports, validations, saves = (
        len([step for step in rest if step % every == 0]) for every in (2, LENGTH // 2, SAVED_EVERY)
    )
    assert count["metrics"] == reports + validations
    assert count["progress"] == reports
    assert count["best_searcher_validation_metric"] == validations
    assert count["checkpoints"] == saves
    assert count["preemption"] <= 3
    assert count[str(followed.trial.id)] == 0  # its searcher, ``single``, stops no trial
    states = {call.body["state"] for call in calls if call.path.endswith("/runner/metadata")}
    assert states == {"training", "validating", "checkpointing"}
    assert not [call for call in calls if call.status not in (200, 404, None)]


# What the web UI's "Use in Notebook" says, for a trial of this library; in a folder without anything of the project.
LOADS = """
import determined as det

from determined_ds import load_model_from_checkpoint_path

with det.import_from_path("got/code"):
    load_model_from_checkpoint_path("got", context_dir="got/code")
    import model_defs.gpt2.model

print(model_defs.gpt2.model.__file__)
"""


@pytest.mark.programs
def test_its_checkpoint_is_downloaded_and_loads_where_nothing_else_of_the_project_is(
    cluster: Cluster, followed: Followed, tmp_path: Path
) -> None:
    """With the files of a run without a cluster, and ``code/``, by which it loads and which its manifest holds, too."""
    got, checkpoint = tmp_path / "got", cluster.checkpoints(followed.trial)[-1]
    cluster.det("checkpoint", "download", checkpoint.uuid, "-o", got)
    [here] = [
        path.parent
        for path in (followed.here / "checkpoints").glob("*/metadata.json")
        if json.loads(path.read_text())["steps_completed"] == LENGTH
    ]
    files, same_files = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (got, here)
    )
    assert files == set(checkpoint.files)
    assert {path for path in files if not path.startswith("code/")} == same_files
    model, same = (
        load_model_from_checkpoint_path(each, context_dir=ROOT).state_dict() for each in (got, here)
    )
    assert model.keys() == same.keys()
    assert all(torch.equal(model[name], same[name]) for name in model)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def loaded() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LOADS]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    done = loaded()
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(got / "code")
    (got / "code/model_defs/gpt2/trial.py").write_text("raise SystemExit('not what was written')")
    assert "code/model_defs/gpt2/trial.py has" in loaded().stderr


CIFAR10 = "tests/session/scripts/cifar10.yaml"
PORTED = ROOT / "tests/session/scripts/cifar10_ported.py"
EPOCHS = 40 if REAL else 2  # of five steps each
SESSION = (
    ONE_THREAD,
    *fit(reporting_period=1),
    "reproducibility.experiment_seed=7",
    entrypoint(CIFAR10, more=f" --epochs {EPOCHS}"),
)
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pipeline": (PIPELINE, LONG_ENOUGH),
    "session": (CIFAR10, SESSION),
}


@pytest.mark.programs
@pytest.mark.long("the same of a pipeline and a script; the tests above pause and activate a trial")
@pytest.mark.parametrize("form", FORMS)
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[..., Path], form: str
) -> None:
    path, words = FORMS[form]
    sent = PORTED if path == CIFAR10 else None  # a script, sent as it is
    number = cluster.create(path, *words, include=sent, paused=True)
    stopped = cluster.stop(number, at=2)
    assert 2 <= stopped < (5 * EPOCHS if sent else LENGTH)
    cluster.activate(number)
    here = metrics_of(run_here(path, *words, context=PORTED.parent if sent else ROOT))
    [trial] = cluster.wait(number)
    assert trial.restarts == 0
    assert cluster.metrics(trial) == here
    if sent:
        assert trial.bestValidation
        best = trial.bestValidation.metrics.avgMetrics
        assert best["accuracy"] == max(metrics["accuracy"] for _, metrics in here["validation"])
    else:
        assert f"resumed at batch {stopped} of {LENGTH}" in cluster.log(trial)


def test_a_trial_that_fails_is_restarted_as_often_as_allowed(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    number = cluster.create(CONST, "max_restarts=1", ONE_SLOT, "entrypoint=echo I fail; exit 3")
    [trial] = cluster.wait(number, "ERROR")
    assert len(cluster.starts(trial)) == 2
    assert len(re.findall(r"I fail$", cluster.log(trial), re.MULTILINE)) == 2
    if isinstance(cluster, FakeCluster):
        left = cluster.kept(trial).allocations
        cluster.poll(lambda: not any(marked(allocation.id, "DET_ALLOCATION_ID") for allocation in left))


# What no restart can help: what is changed, and what is said.
HOPELESS: dict[str, tuple[tuple[str, ...], str]] = {
    "configuration": (
        ("hyperparameters.global_batch_size=33",),
        r"hyperparameters\.global_batch_size = 33 .*; fix: use ",
    ),
    "loss, launched by deepspeed": (
        ("hyperparameters.learning_rate=1.0e30", entrypoint(CONST, "deepspeed")),
        "the loss was not finite at batch ",
    ),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_what_no_restart_can_help_is_started_once_and_says_why(cluster: Cluster, name: str) -> None:
    """Whatever ``max_restarts`` says; in one line, where the web UI's filter "Error" finds it."""
    overrides, said = HOPELESS[name]
    [trial] = cluster.wait(cluster.create(CONST, *SHORT, *overrides), "ERROR")
    assert (trial.restarts, len(cluster.starts(trial))) == (0, 1)
    errors = cluster.log(trial, bindings.v1LogLevel.ERROR)
    assert re.search(said, errors), errors
    assert NO_RESTART_HELPS.removeprefix("ERROR: ") in errors.splitlines()[-1]
