"""Searches run for real, and ended in every way there is: nothing is left running, and nothing is lost."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.experiment.experiment import load_experiment
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.metrics_file import read_records
from determined_ds.search import local_search
from determined_ds.search.course import Course, Exited, Validated
from determined_ds.search.methods import make_search
from determined_ds.search.setup import digest_of
from determined_ds.search.study import STUDY, About, SearchStudy, StudyTrial
from determined_ds.search.trials import processes_below
from tests.command import DET_DS, ROOT, TIMEOUT_S, det_ds, processes_of

SEARCHED = Path(__file__).with_name("searched")
# Its points: a good one, an impossible one, and one that is worse than the first.
SEED = 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context directory with a model to search over."""
    copied = tmp_path_factory.mktemp("search") / "searched"
    shutil.copytree(SEARCHED, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def written(path: Path, *, searcher: dict[str, Any], **hyperparameters: Any) -> Path:
    """``search.yaml`` with another searcher, where there is one, and some other hyperparameters."""
    config = yaml.safe_load((SEARCHED / "search.yaml").read_text())
    config["searcher"] = searcher or config["searcher"]
    config["hyperparameters"].update(hyperparameters)
    path.write_text(yaml.safe_dump(config))
    return path


class Searching:
    """A ``det-ds search`` under way, and what it says."""

    processes: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, words: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [str(DET_DS), *words, "--accelerator", "cpu"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(self.process)
        self.lines: list[str] = []

    def until(self, *said: str) -> None:
        """Read to the line that has these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if all(word in line for word in said):
                return
        raise AssertionError(f"it never said {said}: {self.lines[-3:]} {self.end()}")

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns the exit code, and what it wrote to stderr."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        self.lines += output.splitlines()
        return self.process.returncode, errors


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def study_of(run_dir: Path) -> SearchStudy:
    experiment = load_experiment(run_dir / "experiment.yaml")
    digest = digest_of(experiment.config)
    about = About(name="searched", metric="validation_loss", smaller_is_better=True, search=digest)
    return SearchStudy(run_dir / STUDY, about, experiment.space.axes)


def known(run_dir: Path) -> list[StudyTrial]:
    return study_of(run_dir).trials()


def losses(run_dir: Path, number: int) -> dict[int, float]:
    """The validations of a trial, by its own account."""
    records = read_records(run_dir / "trials" / f"{number:04d}" / "metrics.jsonl")
    return {
        r["steps_completed"]: r["metrics"]["validation_loss"] for r in records if r["group"] == "validation"
    }


# ----------------------------------------------------------------- interrupted, killed, and gone on with


class Interrupted:
    """A trial after the other: in the first of them SIGKILL, then Ctrl-C."""

    def __init__(self, context: Path) -> None:
        self.context, self.run_dir = context, context.parent / "run"
        hold, first = context / "hold", self.run_dir / "trials/0001"
        output = first / "output.log"
        words = ["search", str(context / "search.yaml"), str(context), "--run-dir", str(self.run_dir)]
        words += ["--machine-slots", "1", "--set", f"reproducibility.experiment_seed={SEED}"]

        hold.touch()
        killed = Searching(words)
        killed.until("trial 1", "validated", "batch 4")
        wait_for(lambda: bool(checkpoints_in(first / "checkpoints")))
        killed.process.kill()
        killed.end()
        wait_for(lambda: not processes_below(self.run_dir))  # they end with it
        self.after_kill = known(self.run_dir)

        self.stopped = Searching([*words, "--resume"])
        self.stopped.until("trial 1", "resumed")
        wait_for(lambda: "resumed at batch" in output.read_text())
        self.stopped.process.send_signal(signal.SIGINT)
        wait_for(lambda: "SIGTERM: stopping after this batch" in output.read_text())
        hold.unlink()
        self.stopped_end = self.stopped.end()
        self.left = processes_below(self.run_dir)
        self.after_stop = known(self.run_dir)
        [command] = [
            line for line in self.stopped_end[1].splitlines() if line.startswith("resume with: det-ds ")
        ]

        self.last = Searching(shlex.split(command)[3:-2])  # less --accelerator cpu, which is added again
        self.last_end = self.last.end()
        self.trials = known(self.run_dir)


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Iterator[Interrupted]:
    try:
        yield Interrupted(folder)
        assert not processes_below(folder.parent)
    finally:
        for process in Searching.processes:
            process.kill()


@pytest.mark.programs
def test_a_killed_search_leaves_nothing_and_its_trial_goes_on_from_its_checkpoint(
    interrupted: Interrupted,
) -> None:
    assert [(trial.status, list(trial.values)) for trial in interrupted.after_kill] == [("running", [4])]
    assert any(line.endswith("resumed    from batch 4") for line in interrupted.stopped.lines)
    output = (interrupted.run_dir / "trials/0001/output.log").read_text()
    assert output.count("resumed at batch 4 of 8") == 1


def test_ctrl_c_lets_a_trial_checkpoint_and_says_how_to_go_on(interrupted: Interrupted) -> None:
    code, errors = interrupted.stopped_end
    assert code == 0
    assert "SIGINT: the trials that run finish their batch and write a checkpoint" in errors
    assert not interrupted.left
    assert [(trial.status, list(trial.values)) for trial in interrupted.after_stop] == [("running", [4])]
    assert any(line.startswith("trial 1    paused") for line in interrupted.stopped.lines)
    output = (interrupted.run_dir / "trials/0001/output.log").read_text()
    assert output.count("as requested") == 1
    assert output.count("resumed at batch 6 of 8") == 1


def test_no_interruption_counts_as_a_crash(interrupted: Interrupted) -> None:
    assert interrupted.last_end[0] == 0, interrupted.last_end[1]
    assert [trial.restarts for trial in interrupted.trials] == [0, 0, 0]


def test_it_ends_as_an_uninterrupted_search_would_have(interrupted: Interrupted) -> None:
    """The method told of the same metrics, without an interruption, wants the same trials, points and stops."""
    experiment = load_experiment(
        interrupted.context / "search.yaml", [f"reproducibility.experiment_seed={SEED}"]
    )
    course = Course(search=make_search(experiment.config["searcher"], experiment.space))
    expected = []
    while course.open_trials:
        trial = course.open_trials[0]
        status = "completed"
        if trial.create.hparams["overwrite_deepspeed_args"]["train_micro_batch_size_per_gpu"] == 5:
            course.tell(Exited(trial_id=trial.number, reason="INVALID_HP"))
            status = "dropped"
        else:
            for steps, loss in losses(interrupted.run_dir, trial.number).items():
                metrics = {"validation_loss": loss, "batches": steps}
                if not trial.stop_asked:
                    course.tell(Validated(trial_id=trial.number, metrics=metrics, steps=steps))
            assert trial.last is not None
            status = "completed" if trial.last.steps == 8 else "stopped"
            course.tell(Exited(trial_id=trial.number))
        expected.append((trial.number, status, trial.create.seed))
    assert [(t.number, t.status, t.seed) for t in interrupted.trials] == sorted(expected)
    assert sorted(t.status for t in interrupted.trials) == ["completed", "dropped", "stopped"]
    for trial in interrupted.trials:
        told = losses(interrupted.run_dir, trial.number)
        assert dict(trial.values) == {steps: told[steps] for steps in trial.values}


def test_an_impossible_point_has_had_no_process(interrupted: Interrupted) -> None:
    [dropped] = [trial for trial in interrupted.trials if trial.status == "dropped"]
    assert "is not a multiple of train_micro_batch_size_per_gpu 5" in dropped.why
    assert dropped.started is None
    assert not (interrupted.run_dir / "trials" / f"{dropped.number:04d}").exists()


def test_the_results_are_there(interrupted: Interrupted) -> None:
    lines = (interrupted.run_dir / "results.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == [trial.status for trial in interrupted.trials]
    for name in ("history.png", "parallel_coordinates.png"):
        assert (interrupted.run_dir / name).read_bytes().startswith(b"\x89PNG")


def test_the_best_point_is_reached_again_to_the_last_digit(interrupted: Interrupted, tmp_path: Path) -> None:
    path = interrupted.run_dir / "best.yaml"
    head = path.read_text().splitlines()[0]
    best = min((value, t.number) for t in interrupted.trials for value in t.values.values())
    assert (
        head
        == f"# The best of 3 trials of searched: trial {best[1]}, validation_loss {best[0]!r} after 8 batches."
    )
    config = yaml.safe_load(path.read_text())
    assert config["searcher"] == {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert config["reproducibility"] == {"experiment_seed": SEED}
    assert config["hyperparameters"]["trial_seed"] == interrupted.trials[best[1] - 1].seed
    done = det_ds("run", path, interrupted.context, "--run-dir", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    again = [
        r["metrics"] for r in read_records(tmp_path / "again/metrics.jsonl") if r["group"] == "validation"
    ]
    assert again[-1]["validation_loss"] == best[0]


def test_going_on_with_a_search_that_is_over_trains_nothing(interrupted: Interrupted) -> None:
    before = (interrupted.run_dir / STUDY).read_bytes()
    words = ["search", interrupted.run_dir / "experiment.yaml", interrupted.context]
    done = det_ds(*words, "--run-dir", interrupted.run_dir, "--resume")
    assert done.returncode == 0, done.stderr
    assert "3 trials: " in done.stdout
    assert (interrupted.run_dir / STUDY).read_bytes() == before


def test_at_its_end_the_best_of_all_trials_are_kept(folder: Path) -> None:
    """Two points with validations after batches 4 and 8; their checkpoints are of the same batches."""
    run_dir = folder.parent / "kept"
    config = written(
        folder / "kept.yaml",
        searcher={"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 2},
        does={"type": "categorical", "vals": ["trains", "trains as well"]},
        overwrite_deepspeed_args={"train_micro_batch_size_per_gpu": 8},
    )
    kept = {"save_experiment_best": 1, "save_trial_best": 0, "save_trial_latest": 0}
    words = [f"--set=checkpoint_storage.{name}={value}" for name, value in kept.items()]
    done = det_ds("search", config, folder, "--run-dir", run_dir, "--machine-slots", "2", *words)
    assert done.returncode == 0, done.stderr
    values = {
        (trial.number, batch): value for trial in known(run_dir) for batch, value in trial.values.items()
    }
    best = min(values, key=lambda place: values[place])
    folders = {number: run_dir / "trials" / f"{number:04d}" for number in (1, 2)}
    left = {
        (number, found.steps_completed)
        for number, path in folders.items()
        for found in checkpoints_in(path / "checkpoints")
    }
    assert left == {best}
    assert (
        "deleted     3 checkpoints that checkpoint_storage does not keep (save_experiment_best 1, "
        in done.stdout
    )
    assert (folders[best[0]] / "best").is_dir()
    assert not (folders[3 - best[0]] / "last").exists()
    again = det_ds("search", run_dir / "experiment.yaml", folder, "--run-dir", run_dir, "--resume")
    assert again.returncode == 0, again.stderr
    assert "deleted" not in again.stdout


# ------------------------------------------------------------------------------- trials that fail


@pytest.fixture(scope="module")
def failing(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A grid of what can go wrong with a trial: two at a time."""
    run_dir = folder.parent / "failing"
    config = written(
        folder / "failing.yaml",
        searcher={"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 2},
        does={"type": "categorical", "vals": ["refuses", "crashes", "spoils"]},
        overwrite_deepspeed_args={"train_micro_batch_size_per_gpu": 8},
    )
    words = ["search", config, folder, "--run-dir", run_dir, "--machine-slots", "2"]
    done = det_ds(*words, "--set", "max_restarts=2")
    assert not processes_of(run_dir)
    return run_dir, done


def test_a_crash_is_followed_by_a_restart_and_too_many_are_the_end(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    [crashed] = [trial for trial in known(run_dir) if trial.point["does"] == "crashes"]
    assert (crashed.status, crashed.restarts) == ("failed", 2)
    assert list(crashed.values) == [4]
    assert "the trial called os._exit(3)" in crashed.why
    assert "(restart 2 of 2)" in done.stdout
    output = (run_dir / "trials" / f"{crashed.number:04d}" / "output.log").read_text()
    assert "resumed at batch 4 of 8" in output  # and not from its beginning


def test_a_trial_whose_checkpoints_are_damaged_begins_anew_and_they_are_kept(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    [spoilt] = [trial for trial in known(run_dir) if trial.point["does"] == "spoils"]
    assert (spoilt.status, spoilt.restarts) == ("failed", 2)  # a crash, what that left, and a crash again
    told = [line for line in done.stdout.splitlines() if line.startswith(f"trial {spoilt.number} ")]
    assert any("is damaged" in line and "(restart 2 of 2)" in line for line in told)
    assert any("restarted" in line and "no checkpoint found" in line for line in told)
    folder = run_dir / "trials" / f"{spoilt.number:04d}"
    assert (folder / "output.log").read_text().count("validation  batch 4/8") == 2
    assert list(spoilt.values) == [4]
    assert len(checkpoints_in(folder / "checkpoints.damaged-1")) == 1


def test_a_search_of_which_nothing_came_fails_and_says_why(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = failing
    assert done.returncode == 1
    assert "error: every trial was dropped or failed" in done.stderr
    assert "3 trials: " in done.stdout
    assert done.stdout.count("  1 failed: the trial called os._exit(3) at trial.py:") == 2


def test_a_point_that_the_model_refuses_is_dropped_and_not_restarted(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    [refused] = [trial for trial in known(run_dir) if trial.point["does"] == "refuses"]
    assert (refused.status, refused.restarts) == ("dropped", 0)
    assert "this model cannot be built so" in refused.why
    assert "1 dropped: hyperparameters.does: this model cannot be built so" in done.stdout


# ---------------------------------------------------------------------------- without any process


def test_a_search_whose_every_point_is_impossible_comes_to_an_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method replaces each by another; that one in a million can run does not keep it searching for ever."""
    monkeypatch.setattr(local_search, "MOST_DROPPED", 30)
    batch = {"train_micro_batch_size_per_gpu": {"type": "int", "minval": 1, "maxval": 1_000_000}}
    config = written(tmp_path / "rare.yaml", searcher={}, overwrite_deepspeed_args=batch)
    words = ["search", config, folder, "--accelerator", "cpu", "--run-dir", tmp_path / "run"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 1, done.output
    assert "error: gave up: 30 points in a row cannot run" in done.output
    assert "is not a multiple of train_micro_batch_size_per_gpu" in done.output
    assert not (tmp_path / "run/trials").exists()
    assert len(known(tmp_path / "run")) == 31
