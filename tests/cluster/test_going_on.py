"""What a trial leaves to others, and how it goes on: a fork, an evaluation, continued elsewhere, paused, restarted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_model_from_checkpoint_path
from tests.cluster.cluster import Cluster, metrics_of, reports_of
from tests.cluster.scenarios import (
    CONST,
    EVERY_BATCH,
    HF_TRAINER,
    LENGTH,
    LONG_ENOUGH,
    ONE_SLOT,
    ONE_THREAD,
    PIPELINE,
    SHORT,
    by_launcher,
    entrypoint,
)
from tests.cluster.state import Trial
from tests.harness.command import ROOT
from tests.harness.forked import marked
from tests.package import damage

# What the web UI's "Use in Notebook" says, for a trial of this library; in a folder without anything of the project.
LOADS = """
import determined as det

with det.import_from_path("got/code"):
    import determined_ds
    from determined_ds import load_model_from_checkpoint_path

    model = load_model_from_checkpoint_path("got", context_dir="got/code")
    import model_defs.gpt2.model

print(determined_ds.__file__, model_defs.gpt2.model.__file__)
print(sum(parameter.numel() for parameter in model.parameters()))
"""
forks = pytest.mark.long("forks on a cluster; test_follow downloads, cli/test_going_on.py forks")


@pytest.fixture(scope="module")
def source(cluster: Cluster) -> Trial:
    """``const.yaml``, cut short, profiled: held in its first report until the Profiler tab's metrics have come."""
    made = cluster.create(CONST, *SHORT, ONE_SLOT, "profiling.enabled=true", paused=True)
    with cluster.reached(2, made):
        cluster.poll(lambda: {"cpu", "memory", "disk", "network"} <= made.trials[0].profiled.keys())
    [trial] = cluster.wait(made)
    [of_machine] = trial.profiled["memory"][0].values()
    assert of_machine["memory_free"] > 0
    return trial


def last(trial: Trial) -> str:
    """The uuid of its last checkpoint."""
    assert trial.latest
    return trial.latest.uuid


@forks
def test_a_downloaded_checkpoint_loads_where_nothing_else_of_the_project_is(
    cluster: Cluster, source: Trial, tmp_path: Path
) -> None:
    """In a fresh process and an empty folder, by its own ``code/``; and its manifest holds that code, too."""
    got = tmp_path / "got"
    cluster.det("checkpoint", "download", last(source), "-o", got)
    files = json.loads((got / "manifest.json").read_text())["files"]
    assert {"code/model_defs/gpt2/trial.py", "code/determined_ds/train/__main__.py"} <= files.keys()
    assert not [name for name in files if name.startswith(("code/tests", "code/.", "code/runs"))]

    def loaded() -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-c", LOADS]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    done = loaded()
    assert done.returncode == 0, done.stderr
    imported, number = done.stdout.strip().splitlines()[-2:]
    assert [Path(path).is_relative_to(got / "code") for path in imported.split()] == [True, True]
    assert int(number) > 0
    (got / "code/model_defs/gpt2/trial.py").write_text("raise SystemExit('not what was written')")
    done = loaded()
    assert done.returncode != 0
    assert "code/model_defs/gpt2/trial.py has" in done.stderr


@forks
def test_a_fork_begins_with_the_weights_and_says_so(cluster: Cluster, source: Trial) -> None:
    """As the web UI's Continue Trial does, which makes a new experiment: the rate is that of a first step again."""
    [fork] = cluster.wait(cluster.create(CONST, *SHORT, ONE_SLOT, f"searcher.source_trial_id={source.id}"))
    taken = "its weights alone, with a new optimizer and schedule; counting from batch 0"
    assert f"warm start  batch 10 of trial {source.id}, checkpoint {last(source)}: {taken}" in fork.log
    before, after = (reports_of(trial, "training") for trial in (source, fork))
    assert [steps for steps, _ in after] == [steps for steps, _ in before]
    assert after[0][1]["loss"] < before[0][1]["loss"]
    assert after[0][1]["lr"] == before[0][1]["lr"]


@forks
def test_a_checkpoint_is_evaluated_by_its_uuid_and_nothing_is_trained(
    cluster: Cluster, source: Trial
) -> None:
    """On two slots, where one has trained."""
    evaluates = entrypoint(CONST, more=f" --evaluate {last(source)}")
    [trial] = cluster.wait(cluster.create(CONST, *SHORT, evaluates))
    [(steps, metrics)] = metrics_of(trial)["validation"]
    then = metrics_of(source)["validation"][-1]
    assert steps == then[0]
    assert metrics["validation_loss"] == pytest.approx(then[1]["validation_loss"], rel=1e-5)
    assert not trial.of_group("training")
    assert not trial.checkpoints


# Of continued trials: after a quarter and after half of the batches; and what the log then says.
STAGE = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage"
SCHEDULE = "hyperparameters.pipe_schedule"
CONTINUED = {
    "on 1 slot and on 2 again": (
        CONST,  # without dropout, of which each replica draws its own
        (ONE_SLOT, f"{STAGE}=3"),
        ("resources.slots_per_trial=2", f"{STAGE}=2"),
        r"1 replica, ZeRO 3|2 replicas, ZeRO 2|elastic +2 ranks -> 1 rank;|elastic +1 rank -> 2 ranks;",
    ),
    "under other schedules": (
        PIPELINE,
        (f"{SCHEDULE}=zb-h1", "hyperparameters.partition_method=measured"),
        (f"{SCHEDULE}=dualpipev", "hyperparameters.partition_method=uniform"),
        r"  schedule   1f1b|  schedule   zb-h1|  schedule   dualpipev, 2 chunks a rank: a bubble of ",
    ),
}


@forks
@pytest.mark.parametrize("name", CONTINUED)
def test_canceled_and_continued_it_trains_the_same(
    cluster: Cluster, run_here: Callable[..., Path], name: str
) -> None:
    """Each batch once, and the losses are those of one training."""
    path, then, at_last, said = CONTINUED[name]
    made = cluster.create(path, *EVERY_BATCH, paused=True)
    for at, overrides in ((LENGTH // 4, then), (LENGTH // 2, at_last)):
        cluster.stop(made, at=at, how="cancel")
        words = [word for override in overrides for word in ("--config", override)]
        cluster.det("experiment", "continue", made.id, *words)
    [trial] = cluster.wait(made)
    assert (trial.restarts, len(trial.allocations)) == (0, 3)
    here, found = metrics_of(run_here(path, *EVERY_BATCH)), metrics_of(trial)
    for group, loss in (("training", "loss"), ("validation", "validation_loss")):
        expected = {steps: metrics[loss] for steps, metrics in here[group]}
        assert [steps for steps, _ in found[group]] == list(expected)
        # One sum of 32 samples, or two of 16: the last digits drift apart.
        assert {steps: metrics[loss] for steps, metrics in found[group]} == pytest.approx(expected, rel=1e-4)
    for text in said.split("|"):
        assert re.search(text, trial.log), text


@pytest.mark.long("a cluster whose checkpoints are in S3; test_object_storage has them on ranks")
def test_with_checkpoints_in_s3_it_is_paused_resumed_downloaded_and_forked(
    cluster: Cluster, s3: dict[str, Any], run_here: Callable[..., Path], tmp_path: Path
) -> None:
    storage = [f"checkpoint_storage.{key}={value}" for key, value in {**s3, "prefix": "of/a/team"}.items()]
    made = cluster.create(CONST, *SHORT, *storage, paused=True)
    assert 2 <= cluster.stop(made, at=2) < 5
    cluster.activate(made)
    [trial] = cluster.wait(made)
    assert (trial.restarts, len(trial.allocations)) == (0, 2)
    assert metrics_of(trial) == metrics_of(run_here(CONST, *SHORT))
    assert trial.latest
    assert not list(cluster.storage.glob(f"{last(trial)}*"))
    got, files = tmp_path / "got", set(trial.latest.files)
    cluster.det("checkpoint", "download", last(trial), "-o", got)
    assert {str(path.relative_to(got)) for path in got.rglob("*") if path.is_file()} == files
    assert {"metadata.json", "manifest.json", "code/determined_ds/train/__main__.py"} <= files
    assert damage(got) is None
    assert load_model_from_checkpoint_path(got, context_dir=".").training is False
    [fork] = cluster.wait(
        cluster.create(CONST, *SHORT, *storage, f"searcher.source_checkpoint_uuid={last(trial)}")
    )
    assert f"warm start  batch 10 of trial {trial.id}, checkpoint {last(trial)}" in fork.log


# ------------------------------------------------------------------------------------- paused, and restarted

CIFAR10 = "tests/session/scripts/cifar10.yaml"
# Determined ends this launcher five seconds after its ranks; on a busy machine that is a failure, and a restart.
BY_DEEPSPEED = (by_launcher(CONST, "deepspeed"), "max_restarts=5")
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pipeline": (PIPELINE, ()),
    "launched by deepspeed": (CONST, BY_DEEPSPEED),
    "transformers' Trainer": (HF_TRAINER, ()),
}


@pytest.mark.programs
@pytest.mark.long("the same under another strategy or launcher; test_follow pauses and activates")
@pytest.mark.parametrize("form", FORMS)
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[..., Path], form: str
) -> None:
    path, overrides = FORMS[form]
    made = cluster.create(path, *LONG_ENOUGH, *overrides, paused=True)
    stopped = cluster.stop(made, at=2)
    assert 2 <= stopped < LENGTH
    cluster.activate(made)
    here = metrics_of(run_here(path, *LONG_ENOUGH))
    [trial] = cluster.wait(made)
    assert trial.restarts == 0 or overrides == BY_DEEPSPEED
    found = metrics_of(trial)
    assert found["validation"] == here["validation"]
    assert found["training"] == here["training"] or path == HF_TRAINER  # which reports as it logs
    assert f"resumed at batch {stopped} of {LENGTH}" in trial.log or path == HF_TRAINER


@pytest.mark.programs
@pytest.mark.long("test_follow pauses a trial, and tests/interrupted stops sessions")
def test_a_session_ends_as_if_it_never_was_paused(cluster: Cluster, run_here: Callable[..., Path]) -> None:
    """A script that is sent as it is; two epochs of five steps."""
    script = ROOT / "tests/session/scripts/cifar10_ported.py"
    periods = ("hyperparameters.fit.reporting_period.batches=1", "reproducibility.experiment_seed=7")
    words = (CIFAR10, ONE_THREAD, *periods, entrypoint(CIFAR10, more=" --epochs 2"))
    made = cluster.create(*words, include=script, paused=True)
    assert 2 <= cluster.stop(made, at=2) < 10
    cluster.activate(made)
    [trial] = cluster.wait(made)
    assert (trial.restarts, len(trial.allocations), trial.progress) == (0, 2, 1.0)
    assert metrics_of(trial) == metrics_of(run_here(*words, context=script.parent))


def test_a_trial_that_fails_is_restarted_as_often_as_allowed(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    made = cluster.create(CONST, "max_restarts=1", ONE_SLOT, "entrypoint=echo I fail; exit 3")
    [trial] = cluster.wait(made, "ERROR")
    assert len(trial.allocations) == 2
    assert len(re.findall(r"I fail$", trial.log, re.MULTILINE)) == 2
    cluster.poll(lambda: not any(marked(each.id, "DET_ALLOCATION_ID") for each in trial.allocations))
