"""What a trial leaves to others: a checkpoint that loads anywhere, and weights that another trial begins with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT
from tests.cluster.state import Checkpoint, Trial

pytestmark = pytest.mark.long("forks and downloads on a cluster; test_follow downloads, test_going_on forks")

CONST = "experiments/gpt2/const.yaml"
ONE_SLOT = "resources.slots_per_trial=1"
# What the web UI's "Use in Notebook" says, for a trial of this library; in a folder without anything of the project.
LOADS = """
import determined as det

with det.import_from_path("got/code"):
    import determined_ds
    from determined_ds import load_model_from_checkpoint_path

    model = load_model_from_checkpoint_path("got", code="checkpoint")
    import model_defs.gpt2.model

print(determined_ds.__file__, model_defs.gpt2.model.__file__)
print(sum(parameter.numel() for parameter in model.parameters()))
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trial that was profiled, and its last checkpoint."""

    trial: Trial
    checkpoint: Checkpoint


@pytest.fixture(scope="module")
def source(cluster: Cluster) -> Source:
    """``const.yaml``, cut short, profiled; held in its first report until the system metrics have come."""
    number = cluster.create(CONST, *SHORT, ONE_SLOT, "profiling.enabled=true", paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 1)
    cluster.activate(number)
    cluster.wait_for(lambda: {"cpu", "network"} <= trial.profiled.keys() or trial.closed)
    held.set()
    cluster.wait(number)
    return Source(trial=trial, checkpoint=cluster.checkpoints(trial)[-1])


def test_profiling_fills_the_profiler_tab(source: Source) -> None:
    """With the groups that Determined's own trials report, by machine."""
    profiled = source.trial.profiled
    assert {"cpu", "memory", "disk", "network"} <= profiled.keys()
    [of_machine] = profiled["memory"][0].values()
    assert of_machine["memory_free"] > 0


def test_no_metric_is_a_list_or_an_idle_count_of_epochs(source: Source) -> None:
    for report in (*source.trial.of_group("training"), *source.trial.of_group("validation")):
        assert all(isinstance(value, (int, float)) for value in report.metrics.values()), report.metrics
        assert "epochs" not in report.metrics


def test_a_downloaded_checkpoint_loads_where_nothing_else_of_the_project_is(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    """In a fresh process and an empty folder, by its own ``code/``; and its manifest holds that code, too."""
    got = tmp_path / "got"
    cluster.det("checkpoint", "download", source.checkpoint.uuid, "-o", got)
    files = json.loads((got / "manifest.json").read_text())["files"]
    assert {"code/model_defs/gpt2/trial.py", "code/determined_ds/train.py"} <= files.keys()
    assert not [name for name in files if name.startswith(("code/tests", "code/.", "code/runs"))]
    done = loaded_in(tmp_path)
    assert done.returncode == 0, done.stderr
    imported, number = done.stdout.strip().splitlines()[-2:]
    assert [Path(path).is_relative_to(got / "code") for path in imported.split()] == [True, True]
    assert int(number) > 0

    (got / "code/model_defs/gpt2/trial.py").write_text("raise SystemExit('not what was written')")
    done = loaded_in(tmp_path)
    assert done.returncode != 0
    assert "code/model_defs/gpt2/trial.py has" in done.stderr


def loaded_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh Python that finds the environment's packages and what is in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LOADS]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("key", ["source_checkpoint_uuid", "source_trial_id"])
def test_a_fork_begins_with_the_weights_and_says_so(cluster: Cluster, source: Source, key: str) -> None:
    """As the web UI's Continue Trial does, which makes a new experiment: the rate is that of a first step again."""
    value = source.checkpoint.uuid if key == "source_checkpoint_uuid" else source.trial.id
    number = cluster.create(CONST, *SHORT, ONE_SLOT, f"searcher.{key}={value}")
    cluster.wait(number)
    fork = cluster.trial(number)
    whence = f"batch 10 of trial {source.trial.id}, checkpoint {source.checkpoint.uuid}"
    taken = "its weights alone, with a new optimizer and schedule; counting from batch 0"
    assert cluster.log(fork).count("warm start  ") == 1
    assert f"warm start  {whence}: {taken}" in cluster.log(fork)
    of_source, of_fork = (trial.of_group("training") for trial in (source.trial, fork))
    assert [report.steps for report in of_fork] == [report.steps for report in of_source]
    assert [report.metrics["lr"] for report in of_fork] == [report.metrics["lr"] for report in of_source]
    assert of_fork[0].metrics["loss"] < of_source[0].metrics["loss"]


def test_a_checkpoint_is_evaluated_by_its_uuid_and_nothing_is_trained(
    cluster: Cluster, source: Source
) -> None:
    """On two slots, where one has trained."""
    entrypoint = (
        "entrypoint=python3 -m determined.launch.torch_distributed python3 -m determined_ds.train "
        f"model_defs.gpt2.trial:GPT2Trial --evaluate {source.checkpoint.uuid}"
    )
    number = cluster.create(CONST, *SHORT, entrypoint)
    cluster.wait(number)
    trial = cluster.trial(number)
    [(steps, metrics)] = cluster.metrics(trial, "validation")
    then = cluster.metrics(source.trial, "validation")[-1]
    assert steps == then[0]
    assert metrics["validation_loss"] == pytest.approx(then[1]["validation_loss"], rel=1e-5)
    assert not cluster.metrics(trial, "training")
    assert not cluster.checkpoints(trial)
