"""Scripts, sent to a real cluster as they are: with a session, under transformers' Trainer, by the Core API alone."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cluster.cluster import alike
from tests.cluster.test_session import context_of
from tests.command import ROOT, det_ds_program
from tests.real_cluster.client import TIMEOUT_S, RealCluster
from tests.real_cluster.conftest import ONE_THREAD, SHORT, RunHere
from tests.test_readme import BLOCKS

HF_TRAINER = "experiments/hf_trainer/const.yaml"
# Long enough to be paused in the middle.
LONGER = (
    *SHORT,
    "hyperparameters.sequence_length=32",
    "hyperparameters.fit.max_length.batches=60",
    "hyperparameters.fit.validation_period.batches=20",
    "hyperparameters.fit.checkpoint_period.batches=20",
)
NUM_EPOCHS = 40  # of five steps each


def test_a_session_is_paused_and_activated_without_a_trace(cpu_cluster: RealCluster, tmp_path: Path) -> None:
    cluster = cpu_cluster
    context = context_of(tmp_path / "context")
    config = yaml.safe_load((context / "cifar10.yaml").read_text())
    config["entrypoint"] += f" --epochs {NUM_EPOCHS}"
    (context / "cifar10.yaml").write_text(yaml.safe_dump(config))
    overrides = (ONE_THREAD, "reproducibility.experiment_seed=7")
    number = cluster.create(context / "cifar10.yaml", *overrides, context=context)
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.pause(number)
    [*_, stopped] = cluster.checkpoints(cluster.trial(number))
    assert 4 <= stopped["metadata"]["steps_completed"] < 5 * NUM_EPOCHS
    cluster.det("experiment", "activate", str(number))
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    assert trial["bestValidation"]["metrics"]["avgMetrics"]["accuracy"] > 0.5
    assert cluster.experiment(number)["progress"] == 1.0

    words = [word for override in overrides for word in ("--set", override)]
    run_dir = tmp_path / "here"
    here = det_ds_program(
        "run", context / "cifar10.yaml", context, "--run-dir", run_dir, *words, timeout_s=TIMEOUT_S
    )
    assert here.returncode == 0, here.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for group, found in cluster.metrics(trial).items():
        assert found == [
            (line["steps_completed"], alike(line["metrics"])) for line in lines if line["group"] == group
        ]


def test_transformers_trainer_is_paused_and_activated_without_a_trace(
    cpu_cluster: RealCluster, run_here: RunHere
) -> None:
    cluster = cpu_cluster
    number = cluster.create(HF_TRAINER, *LONGER)
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.pause(number)
    [*_, stopped] = cluster.checkpoints(cluster.trial(number))
    assert 4 <= stopped["metadata"]["steps_completed"] < 60
    cluster.det("experiment", "activate", str(number))
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    here = run_here(HF_TRAINER, *LONGER)
    assert [steps for steps, _ in here["validation"]] == [20, 40, 60]
    assert cluster.metrics(trial)["validation"] == here["validation"]
    assert trial["bestValidation"]["metrics"]["avgMetrics"]["eval_loss"] == min(
        metrics["eval_loss"] for _, metrics in here["validation"]
    )


def test_a_script_of_the_core_api_alone_is_paused_and_activated(cluster: RealCluster, tmp_path: Path) -> None:
    """That of docs/scripts.md, which does not import this library; nor is this library in its context."""
    written(tmp_path, "docs/scripts.md", "experiments/scripted.yaml", "model_defs/scripted/train.py")
    number = cluster.create(
        tmp_path / "experiments/scripted.yaml",
        ONE_THREAD,
        "hyperparameters.num_steps=400",
        context=tmp_path,
    )
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.pause(number)
    stopped = cluster.checkpoints(cluster.trial(number))[-1]["metadata"]["steps_completed"]
    assert stopped < 400
    cluster.det("experiment", "activate", str(number))
    [trial] = cluster.wait(number)
    assert (trial["restarts"], len(cluster.allocations(trial))) == (0, 2)
    found = cluster.metrics(trial)
    assert [steps for steps, _ in found["training"]] == list(range(1, 401))
    assert [steps for steps, _ in found["validation"]] == [400]


def test_a_script_in_a_folder_finds_the_library(cluster: RealCluster, tmp_path: Path) -> None:
    """That of docs/determined-trials.md: no image has the library, and Python alone looks beside the script."""
    context = context_of(tmp_path / "context")
    ignored = (context / ".detignore").read_text()
    (context / ".detignore").write_text(ignored.replace("/*\n", "/*\n!/model_defs\n!/experiments\n", 1))
    written(context, "docs/determined-trials.md", "experiments/plane.yaml", "model_defs/plane/train.py")
    number = cluster.create(context / "experiments/plane.yaml", ONE_THREAD, context=context)
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    found = cluster.metrics(trial)
    assert [steps for steps, _ in found["training"]] == [5, 10, 15, 20]
    assert [steps for steps, _ in found["validation"]] == [10, 20]


def written(folder: Path, page: str, *files: str) -> None:
    """Write files that a page of the documentation shows."""
    shown = {block.file: block.text for block in BLOCKS if block.page == ROOT / page}
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(shown[file])
