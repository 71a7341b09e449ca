"""Searches run for real and ended in every way there is: nothing is left running, and nothing is lost."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from tests.harness.command import DET_DS, ROOT, TIMEOUT_S, det_ds
from tests.package import SearchMethod, checkpoints

SEARCHED = Path(__file__).with_name("searched")
# Its points: a good one, an impossible one, and one that is worse than the first.
SEED = 15
RECORD = "events.jsonl"  # what happened in a search, event by event


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


def trials_of(run_dir: Path) -> list[dict[str, str]]:
    """``results.csv``: what became of each trial."""
    with (run_dir / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run_dir: Path, number: int) -> dict[int, float]:
    """The validations of a trial, by its own account."""
    return validations(run_dir / "trials" / f"{number:04d}")


def validations(run_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        each["steps_completed"]: each["metrics"]["validation_loss"]
        for each in records
        if each["group"] == "validation"
    }


def processes_below(folder: Path) -> list[psutil.Process]:
    """Every process that was started with a path in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return found


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
        wait_for(lambda: bool(checkpoints(first)))
        killed.process.kill()
        killed.end()
        wait_for(lambda: not processes_below(first))  # they end with it
        self.after_kill = losses(self.run_dir, 1)

        self.stopped = Searching([*words, "--resume"])
        self.stopped.until("trial 1", "resumed")
        wait_for(lambda: "resumed at batch" in output.read_text())
        self.stopped.process.send_signal(signal.SIGINT)
        wait_for(lambda: "SIGTERM: stopping after this batch" in output.read_text())
        hold.unlink()
        self.stopped_end = self.stopped.end()
        self.left = processes_below(first)
        [command] = [
            line for line in self.stopped_end[1].splitlines() if line.startswith("resume with: det-ds ")
        ]

        self.last = Searching(shlex.split(command)[3:-2])  # less --accelerator cpu, which is added again
        self.last_end = self.last.end()
        self.trials = trials_of(self.run_dir)


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Iterator[Interrupted]:
    try:
        yield Interrupted(folder)
        assert not processes_below(folder.parent)
    finally:
        for process in Searching.processes:
            process.kill()


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
@pytest.mark.programs
def test_a_killed_search_leaves_nothing_and_its_trial_resumes_from_its_checkpoint(
    interrupted: Interrupted,
) -> None:
    assert list(interrupted.after_kill) == [4]
    assert any(line.endswith("resumed    from batch 4") for line in interrupted.stopped.lines)
    output = (interrupted.run_dir / "trials/0001/output.log").read_text()
    assert output.count("resumed at batch 4 of 8") == 1


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_ctrl_c_lets_a_trial_checkpoint_and_prints_the_command_to_resume(interrupted: Interrupted) -> None:
    code, errors = interrupted.stopped_end
    assert code == 0
    assert "SIGINT: the trials that run finish their batch and write a checkpoint" in errors
    assert not interrupted.left
    assert any(line.startswith("trial 1    paused") for line in interrupted.stopped.lines)
    output = (interrupted.run_dir / "trials/0001/output.log").read_text()
    assert output.count("resumed at batch 6 of 8") == 1


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_no_interruption_counts_as_a_crash(interrupted: Interrupted) -> None:
    assert interrupted.last_end[0] == 0, interrupted.last_end[1]
    assert [trial["restarts"] for trial in interrupted.trials] == ["0", "0", "0"]


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_it_ends_as_an_uninterrupted_search_would_have(interrupted: Interrupted) -> None:
    """The method, given the same metrics without an interruption, wants the same trials, points and stops."""
    config = yaml.safe_load((interrupted.context / "search.yaml").read_text())
    method = SearchMethod(config["searcher"], config["hyperparameters"], SEED)
    waiting, expected = method.start(), []
    while waiting:
        _, hyperparameters, seed = waiting.pop(0)
        number, status = len(expected) + 1, ""
        if hyperparameters["overwrite_deepspeed_args"]["train_micro_batch_size_per_gpu"] == 5:
            status, done = "dropped", method.exited(number, "INVALID_HP")
        else:
            done = []
            for steps, loss in losses(interrupted.run_dir, number).items():
                done += method.validated(number, {"validation_loss": loss, "batches": steps})
                status = "completed" if steps == 8 else "stopped"
                if ("stop", number) in done:
                    break
            done += method.exited(number)
        waiting += [action for action in done if action[0] == "create"]
        expected.append((str(number), status, str(seed)))
    assert [(each["trial"], each["status"], each["seed"]) for each in interrupted.trials] == expected
    assert sorted(each["status"] for each in interrupted.trials) == ["completed", "dropped", "stopped"]


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_an_impossible_point_has_had_no_process(interrupted: Interrupted) -> None:
    [dropped] = [trial for trial in interrupted.trials if trial["status"] == "dropped"]
    assert "is not a multiple of train_micro_batch_size_per_gpu 5" in dropped["reason"]
    assert dropped["started"] == ""
    assert not (interrupted.run_dir / "trials" / f"{int(dropped['trial']):04d}").exists()


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_its_report_is_there(interrupted: Interrupted) -> None:
    assert "0001" in (interrupted.run_dir / "report.html").read_text()


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_the_best_point_is_reached_again_to_the_last_digit(interrupted: Interrupted, tmp_path: Path) -> None:
    path = interrupted.run_dir / "best.yaml"
    trained = [int(each["trial"]) for each in interrupted.trials if each["status"] != "dropped"]
    value, best = min((min(losses(interrupted.run_dir, number).values()), number) for number in trained)
    head = path.read_text().splitlines()[0]
    assert (
        head
        == f"# The best of 3 trials of searched: trial {best}, validation_loss {value!r} after 8 batches."
    )
    config = yaml.safe_load(path.read_text())
    assert config["searcher"] == {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert str(config["hyperparameters"]["trial_seed"]) == interrupted.trials[best - 1]["seed"]
    done = det_ds("run", path, interrupted.context, "--run-dir", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert validations(tmp_path / "again")[8] == value


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_resuming_a_search_that_is_over_trains_nothing(interrupted: Interrupted) -> None:
    """Also where the last line of its record was torn: nothing had followed from it."""

    def held() -> list[object]:
        """All but when trials ended: the last of them ends once more."""
        rows = [[value for name, value in row.items() if name != "ended"] for row in trials_of(run_dir)]
        metrics = [losses(run_dir, number) for number in (1, 3)]
        return [rows, metrics, (run_dir / "best.yaml").read_text()]

    run_dir = interrupted.run_dir
    before, record = held(), run_dir / RECORD
    for cut in (0, 5):
        os.truncate(record, record.stat().st_size - cut)
        words = ["search", run_dir / "experiment.yaml", interrupted.context, "--run-dir", run_dir, "--resume"]
        done = det_ds(*words)
        assert done.returncode == 0, done.stderr
        assert "3 trials: " in done.stdout
        assert held() == before


@pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")
def test_a_damaged_record_of_a_search_is_refused_and_left_as_it_is(interrupted: Interrupted) -> None:
    record = interrupted.run_dir / RECORD
    whole = record.read_bytes()
    lines = whole.splitlines(keepends=True)
    middle = len(lines) // 2
    words = ["search", interrupted.run_dir / "experiment.yaml", interrupted.context]
    torn = [*lines[:middle], lines[middle][:20] + b"\n", *lines[middle + 1 :]]
    try:
        for damaged in (b"".join(torn), b"".join(lines[1:]), b"hello\nthere\n"):
            record.write_bytes(damaged)
            done = det_ds(*words, "--run-dir", interrupted.run_dir, "--resume")
            assert done.returncode == 2, damaged[:80]
            assert str(record) in done.stderr
            assert "fix: " in done.stderr
            assert record.read_bytes() == damaged
    finally:
        record.write_bytes(whole)


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
    assert not processes_below(run_dir)
    return run_dir, done


def trial_that(run_dir: Path, does: str) -> dict[str, str]:
    [found] = [trial for trial in trials_of(run_dir) if trial["does"] == does]
    return found


def test_a_crash_is_followed_by_a_restart_and_too_many_are_the_end(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    crashed = trial_that(run_dir, "crashes")
    assert (crashed["status"], crashed["restarts"]) == ("failed", "2")
    assert "the trial called exit(3)" in crashed["reason"]
    assert "(restart 2 of 2)" in done.stdout
    output = (run_dir / "trials" / f"{int(crashed['trial']):04d}" / "output.log").read_text()
    assert "resumed at batch 4 of 8" in output  # and not from its beginning


def test_a_trial_whose_checkpoints_are_damaged_begins_anew_and_they_are_kept(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    damaged = trial_that(run_dir, "spoils")
    assert (damaged["status"], damaged["restarts"]) == (
        "failed",
        "2",
    )  # a crash, what that left, and a crash again
    told = [line for line in done.stdout.splitlines() if line.startswith(f"trial {damaged['trial']} ")]
    assert any("is damaged" in line and "(restart 2 of 2)" in line for line in told)
    assert any("restarted" in line and "no checkpoint found" in line for line in told)
    folder = run_dir / "trials" / f"{int(damaged['trial']):04d}"
    assert (folder / "output.log").read_text().count("validation  batch 4/8") == 2
    assert len(checkpoints(folder / "checkpoints.damaged-1")) == 1


def test_a_search_of_which_nothing_came_fails_and_says_why(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = failing
    assert done.returncode == 1
    assert "error: every trial was dropped or failed" in done.stderr
    assert "3 trials: " in done.stdout
    assert done.stdout.count("  1 failed: the trial called exit(3) at trial.py:") == 2


def test_a_point_that_the_model_refuses_is_dropped_and_not_restarted(
    failing: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = failing
    refused = trial_that(run_dir, "refuses")
    assert (refused["status"], refused["restarts"]) == ("dropped", "0")
    assert "this model cannot be built so" in refused["reason"]
    assert "1 dropped: hyperparameters.does: this model cannot be built so" in done.stdout
