"""Searches run for real and ended in every way there is: nothing is left running, and nothing is lost."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.harness.command import TIMEOUT_S, Started, det_ds
from tests.package import SearchMethod, checkpoints, records
from tests.rundir.runs import until

SEARCHED = Path(__file__).with_name("searched")
# Its points: a good one, an impossible one, and one that is worse than the first.
SEED = 15
LONG = pytest.mark.long("tests/interrupted kills runs, and cli/test_autotune stops several")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context directory with a model to search over."""
    copied = tmp_path_factory.mktemp("search") / "searched"
    shutil.copytree(SEARCHED, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def trials_of(run_dir: Path) -> list[dict[str, str]]:
    """``results.csv``: what became of each trial."""
    with (run_dir / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run_dir: Path) -> dict[int, float]:
    """The validations of a trial, by its own account."""
    return {steps: metrics["validation_loss"] for steps, metrics in records(run_dir, "validation")}


# ----------------------------------------------------------------- interrupted, killed, and gone on with


class Interrupted:
    """A trial after the other: in the first of them SIGKILL, then Ctrl-C."""

    def __init__(self, context: Path, started: Callable[..., Started]) -> None:
        self.context, self.run_dir = context, context.parent / "run"
        self.first = self.run_dir / "trials/0001"
        hold, output, events = context / "hold", self.first / "output.log", self.run_dir / "events.jsonl"
        words = ["search", context / "search.yaml", context, "--run-dir", self.run_dir]
        words += ["--set", "resources.max_slots=1", "--set", f"reproducibility.experiment_seed={SEED}"]
        hold.touch()
        killed = started(*words)
        until(lambda: checkpoints(self.first) and '"validated"' in events.read_text())
        killed.send_signal(signal.SIGKILL)
        killed.wait(TIMEOUT_S)
        until(lambda: not killed.processes())  # they end with it
        self.after_kill = losses(self.first)

        stopped = started(*words, "--resume")
        until(lambda: "resumed at batch" in output.read_text())
        stopped.send_signal(signal.SIGINT)
        until(lambda: "SIGTERM: stopping after this batch" in output.read_text())
        time.sleep(3)  # until the ranks have been told, too, on a busy machine as well
        hold.unlink()
        self.stopped = stopped.communicate(TIMEOUT_S)
        self.left, self.code = stopped.processes(), stopped.returncode
        [command] = [line for line in self.stopped[1].splitlines() if line.startswith("resume with: det-ds ")]
        self.last = det_ds(*shlex.split(command)[3:])
        self.trials = trials_of(self.run_dir)


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Iterator[Interrupted]:
    processes: list[Started] = []

    def started(*words: str | Path) -> Started:
        processes.append(Started(*words))
        return processes[-1]

    try:
        yield Interrupted(folder, started)
    finally:
        for process in processes:
            process.close()


@LONG
@pytest.mark.programs
def test_a_search_that_is_killed_or_interrupted_leaves_nothing_and_goes_on_from_checkpoints(
    interrupted: Interrupted,
) -> None:
    assert list(interrupted.after_kill) == [4]
    said, errors = interrupted.stopped
    assert "resumed    from batch 4" in said
    assert (interrupted.code, interrupted.left) == (0, {})
    assert "SIGINT: the trials that run finish their batch and write a checkpoint" in errors
    assert "trial 1    paused" in said
    output = (interrupted.first / "output.log").read_text()
    assert [output.count(f"resumed at batch {batch} of 8") for batch in (4, 6)] == [1, 1]
    assert interrupted.last.returncode == 0, interrupted.last.stderr
    assert [trial["restarts"] for trial in interrupted.trials] == ["0", "0", "0"]


@LONG
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
            for steps, loss in losses(interrupted.run_dir / "trials" / f"{number:04d}").items():
                done += method.validated(number, {"validation_loss": loss, "batches": steps})
                status = "completed" if steps == 8 else "stopped"
                if ("stop", number) in done:
                    break
            done += method.exited(number)
        waiting += [action for action in done if action[0] == "create"]
        expected.append((str(number), status, str(seed)))
    assert [(each["trial"], each["status"], each["seed"]) for each in interrupted.trials] == expected
    assert sorted(each["status"] for each in interrupted.trials) == ["completed", "dropped", "stopped"]
    [dropped] = [trial for trial in interrupted.trials if trial["status"] == "dropped"]
    assert "is not a multiple of train_micro_batch_size_per_gpu 5" in dropped["reason"]
    assert not (interrupted.run_dir / "trials" / f"{int(dropped['trial']):04d}").exists()
    assert "0001" in (interrupted.run_dir / "report.html").read_text()


@LONG
def test_the_best_point_is_reached_again_to_the_last_digit(interrupted: Interrupted, tmp_path: Path) -> None:
    path = interrupted.run_dir / "best.yaml"
    ends = [losses(trial) for trial in sorted((interrupted.run_dir / "trials").iterdir())]
    value = min(min(each.values()) for each in ends)
    [best] = [each for each in interrupted.trials if each["validation_loss"] == repr(value)]
    said = f"# The best of 3 trials of searched: trial {best['trial']}, validation_loss {value!r} after 8 batches."
    assert path.read_text().splitlines()[0] == said
    config = yaml.safe_load(path.read_text())
    assert config["searcher"] == {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert str(config["hyperparameters"]["trial_seed"]) == best["seed"]
    done = det_ds("run", path, interrupted.context, "--run-dir", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "again")[8] == value


@LONG
def test_a_search_that_is_over_trains_nothing_and_a_damaged_record_is_refused(
    interrupted: Interrupted,
) -> None:
    """Also where the last line of its record was torn: nothing had followed from it."""
    run_dir = interrupted.run_dir
    record = run_dir / "events.jsonl"

    def held() -> list[object]:
        """All but when trials ended: the last of them ends once more."""
        rows = [[*row.values()] for row in trials_of(run_dir)]
        return [rows, losses(interrupted.first), (run_dir / "best.yaml").read_text()]

    before = held()
    words = ["search", run_dir / "experiment.yaml", interrupted.context, "--run-dir", run_dir, "--resume"]
    for cut in (0, 5):
        os.truncate(record, record.stat().st_size - cut)
        done = det_ds(*words)
        assert done.returncode == 0, done.stderr
        assert "3 trials: " in done.stdout
        assert held() == before
    lines = record.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    damaged = b"".join([*lines[:middle], lines[middle][:20] + b"\n", *lines[middle + 1 :]])
    record.write_bytes(damaged)
    done = det_ds(*words)
    assert done.returncode == 2
    assert str(record) in done.stderr
    assert record.read_bytes() == damaged


# ------------------------------------------------------------------------------- trials that fail


def test_what_goes_wrong_with_a_trial_is_its_end_after_as_many_restarts_as_may_help(folder: Path) -> None:
    """One that crashes resumes, one whose checkpoints are damaged begins anew, and an impossible one is dropped."""
    run_dir, path = folder.parent / "failing", folder / "failing.yaml"
    config = yaml.safe_load((SEARCHED / "search.yaml").read_text())
    config["searcher"] = {"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 2}
    config["hyperparameters"]["does"] = {"type": "categorical", "vals": ["refuses", "crashes", "spoils"]}
    config["hyperparameters"]["overwrite_deepspeed_args"] = {"train_micro_batch_size_per_gpu": 8}
    path.write_text(yaml.safe_dump(config))
    options = ["--run-dir", run_dir, "--set", "resources.max_slots=2", "--set", "max_restarts=2"]
    done = det_ds("search", path, folder, *options)
    assert done.returncode == 1
    assert "error: every trial was dropped or failed" in done.stderr
    assert done.stdout.count("  2 failed: RuntimeError: a bad sample") == 1
    trials = {trial["does"]: trial for trial in trials_of(run_dir)}

    def files(does: str) -> Path:
        return run_dir / "trials" / f"{int(trials[does]['trial']):04d}"

    crashed, damaged, refused = (trials[does] for does in ("crashes", "spoils", "refuses"))
    assert (crashed["status"], crashed["restarts"]) == ("failed", "2")
    assert "a bad sample" in crashed["reason"]
    assert "resumed at batch 4 of 8" in (files("crashes") / "output.log").read_text()

    assert (damaged["status"], damaged["restarts"]) == ("failed", "2")
    assert "restart 1 of 2 from step 0" in (files("spoils") / "output.log").read_text()

    assert (refused["status"], refused["restarts"]) == ("dropped", "0")
    assert "1 dropped: hyperparameters.does: this model cannot be built so" in done.stdout
