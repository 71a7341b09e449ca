"""``--resume UUID|PATH|best|last``: real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from determined_ds import load_state_dict_from_checkpoint_path
from determined_ds.cli.main import main
from determined_ds.cli.run import run as run_command
from determined_ds.errors import EXIT_CONFIG, EXIT_CRASHED
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.restarting import Restarts
from determined_ds.launch.resuming import Start
from determined_ds.protocol.checkpoint_files import (
    Checkpoint,
    checkpoints_in,
    files_of,
    fingerprint,
    write_manifest,
)
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.run_dir import RunDir
from tests.cli.conftest import OWN_MODEL
from tests.command import det_ds

LENGTH = "hyperparameters.fit.max_length.batches"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``own_model`` and ``run``: six batches by two ranks, checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(OWN_MODEL, folder / "own_model", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(folder, "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(trained, tmp_path / "copied")
    return tmp_path / "copied"


def run(folder: Path, run_dir: str, *words: str) -> Any:
    config, context = folder / "own_model/experiment.yaml", folder / "own_model"
    return det_ds("run", config, context, "--run-dir", folder / run_dir, *words)


def invoke(folder: Path, run_dir: str, *words: str) -> Any:
    """``det-ds run`` in this process, where no rank is started."""
    config = str(folder / "own_model/experiment.yaml")
    where = ["--run-dir", str(folder / run_dir), "--accelerator", "cpu"] if run_dir else []
    return CliRunner().invoke(main, ["run", config, str(folder / "own_model"), *where, *words])


def refused(folder: Path, run_dir: str, *words: str) -> str:
    result = invoke(folder, run_dir, *words)
    assert result.exit_code == EXIT_CONFIG, result.output
    assert "fix:" in result.stderr
    return str(result.stderr)


def at(run_dir: Path, steps: int) -> Checkpoint:
    (found,) = [each for each in checkpoints_in(run_dir / "checkpoints") if each.steps_completed == steps]
    return found


def reported(run_dir: Path) -> list[int]:
    return [record["steps_completed"] for record in read_records(RunDir(run_dir).metrics, "training")]


def same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    left, right = (load_state_dict_from_checkpoint_path(each.path) for each in (one, other))
    return all(torch.equal(left[name], right[name]) for name in left.keys() | right.keys())


def contents(run_dir: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(run_dir)): path for path in run_dir.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(("logs", ".lock"))}


def be_best(run_dir: Path, steps: int) -> None:
    """Have the validation at a batch be the best."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["group"] == "validation":
            record["metrics"]["validation_loss"] = abs(record["steps_completed"] - steps) + 0.5
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))


def test_from_an_earlier_one_the_run_is_trained_again_from_there(trained: Path, copied: Path) -> None:
    """Bit for bit as before; what was written after it is kept apart, and is the run's no longer."""
    there = copied / "run"
    be_best(there, 4)
    before = {each.steps_completed: each.uuid for each in checkpoints_in(there / "checkpoints")}
    done = run(copied, "run", "--resume", "best", "--set", f"{LENGTH}=7")
    assert done.returncode == 0, done.stderr
    assert f"  resume     batch 4, checkpoint {before[4]}\n" in done.stdout
    assert (
        f"  superseded {before[6]} (batch 6)\n             metrics after batch 4 are removed\n" in done.stdout
    )
    assert reported(there) == [1, 2, 3, 4, 5, 6, 7]
    after = {each.steps_completed: each.uuid for each in checkpoints_in(there / "checkpoints")}
    assert sorted(after) == [2, 4, 6, 7]
    assert (after[2], after[4]) == (before[2], before[4])
    assert after[6] != before[6]
    assert [each.uuid for each in checkpoints_in(there / "superseded/checkpoints")] == [before[6]]
    assert same_weights(at(there, 6), at(trained / "run", 6))
    assert not (there / ".next").exists()
    result = json.loads((there / "result.json").read_text())
    assert (result["steps_completed"], result["checkpoint"]["uuid"]) == (7, after[7])


def test_another_runs_is_continued_in_a_new_run_directory(trained: Path) -> None:
    """By its uuid too; with its optimizer and its place in the data; the other run stays as it is."""
    before = contents(trained / "run")
    origin = at(trained / "run", 2)
    done = run(trained, "continued", "--resume", str(origin.path))
    assert done.returncode == 0, done.stderr
    assert f"  resume     batch 2, checkpoint {origin.uuid} in {trained / 'run'}/checkpoints\n" in done.stdout
    assert "warm start" not in done.stdout
    there = trained / "continued"
    assert reported(there) == [3, 4, 5, 6]
    assert [each.steps_completed for each in checkpoints_in(there / "checkpoints")] == [6, 4]
    assert same_weights(at(there, 6), at(trained / "run", 6))
    assert contents(trained / "run") == before
    again = run(trained, "continued", "--resume", "--set", f"{LENGTH}=7")
    assert again.returncode == 0, again.stderr
    assert reported(there) == [3, 4, 5, 6, 7]


def test_one_of_a_trial_on_a_cluster_is_resumed_too(copied: Path, tmp_path: Path) -> None:
    """As ``det checkpoint download`` writes it: its trial has a number."""
    folder = shutil.copytree(at(copied / "run", 4).path, tmp_path / "downloaded")
    state = json.loads((folder / "trial_state.json").read_text())
    (folder / "trial_state.json").write_text(json.dumps({**state, "trial_id": 7}))
    marks = {name: fingerprint(folder / name) for name in files_of(folder)}
    write_manifest(folder, marks, json.loads((folder / "metadata.json").read_text()))
    shutil.rmtree(copied / "run/checkpoints")
    done = run(copied, "new", "--resume", str(folder), "--set", f"{LENGTH}=5")
    assert done.returncode == 0, done.stderr
    assert "warm start" not in done.stdout
    assert reported(copied / "new") == [5]


def test_a_run_that_does_not_load_it_is_as_it_was(copied: Path) -> None:
    trial = copied / "own_model/trial.py"
    trial.write_text(trial.read_text().replace("torch.nn.Linear(4, 1)", "torch.nn.Linear(4, 1, bias=False)"))
    before = contents(copied / "run")
    done = run(copied, "run", "--resume", at(copied / "run", 2).uuid)
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "superseded " in done.stdout
    assert contents(copied / "run") == before


def test_what_cannot_be_resumed_is_refused_and_nothing_changes(copied: Path) -> None:
    there, newest = copied / "run", at(copied / "run", 6)
    shutil.copytree(there, copied / "other")
    before = contents(there)
    assert "--resume = 'nowhere': there is no such checkpoint" in refused(
        copied, "run", "--resume", "nowhere"
    )
    other = str(at(copied / "other", 2).path)
    told = refused(copied, "run", "--resume", other)
    assert "holds a run already, and checkpoint" in told
    assert "give a new --run-dir, which continues from it" in told
    assert "needs the --run-dir" in refused(copied, "", "--resume", other)
    assert "has none" in refused(copied, "new", "--resume", "best")
    assert contents(there) == before
    assert not (copied / "new").exists()
    (newest.path / "trial_state.json").write_text("{}")
    told = refused(copied, "run", "--resume", newest.uuid)
    assert "cannot be loaded: trial_state.json has 2 bytes" in told


def test_under_a_scheduler_that_repeats_the_command_the_run_resumes_from_its_own(
    copied: Path,
) -> None:
    from determined_ds.launch.resuming import start_in

    experiment = decided(copied)
    other = str(at(copied / "run", 2).path)
    kwargs: dict[str, Any] = {"resume": other, "stated": True, "forks": False, "repeated": True}
    first = start_in(copied / "new", experiment, None, **kwargs)
    assert first.checkpoint is not None
    assert (first.elsewhere, first.checkpoint.steps_completed) == (True, 2)
    shutil.copytree(copied / "run/checkpoints", copied / "new/checkpoints")
    again = start_in(copied / "new", experiment, None, **kwargs)
    assert again.checkpoint is not None
    assert (again.elsewhere, again.checkpoint.steps_completed) == (False, 6)
    assert "has begun already" in again.damages[0]


def decided(folder: Path) -> Any:
    from determined_ds.experiment.experiment import load_experiment

    return load_experiment(folder / "own_model/experiment.yaml", name="experiment.yaml")


def test_a_crash_before_it_is_loaded_is_restarted_from_it_and_after_it_from_the_newest(
    copied: Path, tmp_path: Path
) -> None:
    crash = Outcome(failures=(Failure(rank=0, time=0.0, code=EXIT_CRASHED, exit_code=EXIT_CRASHED),))
    there, named = copied / "run", at(copied / "run", 2)

    def restarted(run_dir: Path, start: Start) -> Start:
        again = Restarts(allowed=1, run_dir=run_dir, start=start).after(crash)
        assert again is not None
        return again.start

    start = Start(checkpoint=named, superseded=(at(there, 6), at(there, 4)))
    assert restarted(there, start) == start
    for later in start.superseded:
        shutil.rmtree(later.path)
    after = restarted(there, start)
    assert (after.checkpoint, after.superseded) == (named, ())
    elsewhere = Start(checkpoint=named, elsewhere=True)
    assert restarted(tmp_path / "new", elsewhere) == elsewhere
    shutil.copytree(named.path, tmp_path / "new/checkpoints/own")
    after = restarted(tmp_path / "new", elsewhere)
    assert after.checkpoint is not None
    assert (after.checkpoint.uuid, after.elsewhere) == ("own", False)


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ("CONFIG CONTEXT --resume", "last"),
        ("--resume CONFIG CONTEXT", "last"),
        ("CONFIG --resume CONTEXT", "last"),
        ("CONFIG CONTEXT --resume --storage", "last"),
        ("CONFIG --resume best CONTEXT", "best"),
        ("CONFIG CONTEXT --resume=a-uuid", "a-uuid"),
        ("CONFIG --resume RUN CONTEXT", "RUN"),
        ("CONFIG CONTEXT", None),
    ],
)
def test_alone_or_with_a_word_wherever_it_stands(trained: Path, words: str, resume: str | None) -> None:
    model = trained / "own_model"
    places = {"CONFIG": str(model / "experiment.yaml"), "CONTEXT": str(model), "RUN": str(trained / "run")}
    params = run_command.make_context("run", [places.get(word, word) for word in words.split()]).params
    assert params["resume"] == (resume and places.get(resume, resume))
    assert (params["config"], params["context_dir"]) == (model / "experiment.yaml", model)
