"""Runs, searches and tunings killed at random moments: what is gone on with ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from determined_ds.report.results import load_results
from tests.campaigns.case import Case
from tests.command import DET_DS, ROOT
from tests.runtime.test_resume import STRATEGIES, experiment
from tests.runtime.victim import differences, is_measured, last_words

KILLS_A_RUN = 5
BEST = "best.yaml"
PATIENCE_S = 600.0
OWN_MODEL = ROOT / "tests" / "cli" / "own_model"
SEARCHED = ROOT / "tests" / "search" / "searched"


def kills(count: int, draw: random.Random, folder: Path) -> Iterator[Case]:
    """As many kills as asked for: three in five of runs, one of searches, one of tunings."""
    done, number = 0, 0
    while done < count:
        kind = ["run", "run", "run", "search", "autotune"][number % 5]
        here = folder / str(number)
        here.mkdir()
        victim = VICTIMS[kind](here, draw)
        failures: list[str] = []
        num_kills = 0
        for _ in range(min(KILLS_A_RUN, count - done)):
            if victim.is_complete():
                break
            num_kills += victim.kill_once(draw, failures)
        done += num_kills
        failures += victim.finish()
        yield Case(name=f"{victim.name}, killed {num_kills} times", failures=failures)
        shutil.rmtree(here)
        number += 1


class Victim:
    """A command that is killed and gone on with.

    Attributes:
        name: What it is.
        whole_s: Seconds that it takes uninterrupted.
    """

    def __init__(self, name: str, here: Path, command: list[str]) -> None:
        self.name = name
        self.run_dir = here / "killed"
        self._command = command
        self._log = here / "log"
        started = time.monotonic()
        self.whole_dir = here / "whole"
        code = self._start(self.whole_dir, resume=False).wait(timeout=PATIENCE_S)
        assert code == 0, self._log.read_text()
        self.whole_s = time.monotonic() - started
        self._is_complete = False

    def _start(self, run_dir: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        words = [*self._command, "--run-dir", str(run_dir), *(["--resume"] if resume else [])]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(DET_DS), *words, "--accelerator", "cpu"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def resumes(self) -> bool:
        """Whether there is something to go on with."""
        return (self.run_dir / "experiment.yaml").is_file()

    def is_complete(self) -> bool:
        return self._is_complete

    def kill_once(self, draw: random.Random, failures: list[str]) -> int:
        """Start, kill a process of it after a while; how many kills met something that lived."""
        process = self._start(self.run_dir, resume=self.resumes)
        wait_s = draw.uniform(0.0, 0.9 * self.whole_s)
        whom = draw.choice(["first", "any", "all"])
        try:
            code = process.wait(timeout=wait_s)
            self._is_complete = code == 0
            if code:
                failures.append(f"exit code {code} by itself: {self._last_words()}")
            return 0
        except subprocess.TimeoutExpired:
            pass
        below = psutil.Process(process.pid).children(recursive=True)
        targets = {"first": [], "any": below and [draw.choice(below)], "all": below}[whom] or []
        for target in targets:
            _kill(target.pid)
        if whom != "any" or not targets:
            _kill(process.pid)
        try:
            code = process.wait(timeout=PATIENCE_S)
            self._is_complete = code == 0
        except subprocess.TimeoutExpired:
            failures.append(f"still running {PATIENCE_S:.0f} s after {whom} was killed")
            _kill(process.pid)
            process.wait()
        failures += self._left_running(below)
        return 1

    def _left_running(self, below: list[psutil.Process]) -> list[str]:
        _, alive = psutil.wait_procs(below, timeout=20)
        alive = [process for process in alive if process.is_running()]
        for process in alive:
            _kill(process.pid)
        return [f"left running: {process}" for process in alive]

    def finish(self) -> list[str]:
        """Go on to the end, and compare."""
        if not self._is_complete:
            code = self._start(self.run_dir, resume=self.resumes).wait(timeout=PATIENCE_S)
            if code:
                return [f"exit code {code} at the end: {self._last_words()}"]
        return self.compare()

    def compare(self) -> list[str]:
        """What differs from the one that was not interrupted."""
        raise NotImplementedError

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-6:])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class RunVictim(Victim):
    """``det-ds run`` of a small model by one of the strategies."""

    def __init__(self, here: Path, draw: random.Random) -> None:
        strategy = draw.choice(list(STRATEGIES))
        config = here / "victim.yaml"
        config.write_text(yaml.safe_dump(experiment(**STRATEGIES[strategy])))
        super().__init__(f"run {strategy}", here, ["run", str(config), str(ROOT)])

    def compare(self) -> list[str]:
        return differences(last_words(self.whole_dir), last_words(self.run_dir))


class SearchVictim(Victim):
    """``det-ds search`` of four trials, one at a time."""

    def __init__(self, here: Path, draw: random.Random) -> None:
        context = here / "context"
        shutil.copytree(SEARCHED, context)
        changes = [
            "--set",
            "searcher.max_trials=3",
            "--set",
            "max_restarts=99",  # a trial whose ranks are killed too often fails, as it should
            "--set",
            f"reproducibility.experiment_seed={draw.randrange(100)}",
        ]
        super().__init__("search", here, ["search", str(context / "search.yaml"), str(context), *changes])

    def compare(self) -> list[str]:
        """A trial that is stopped trains on until it hears of it: for how many batches depends on the machine."""
        whole, killed = _metrics_below(self.whole_dir), _metrics_below(self.run_dir)
        for name in whole.keys() & killed.keys() - {BEST}:
            common = min(len(whole[name]), len(killed[name]))
            whole[name], killed[name] = whole[name][:common], killed[name][:common]
        return differences(whole, killed)


def _metrics_below(run_dir: Path) -> dict[str, Any]:
    found = {}
    for file in sorted(run_dir.rglob("metrics.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found[str(file.relative_to(run_dir))] = [
            (r["group"], r["steps_completed"], {k: v for k, v in r["metrics"].items() if not is_measured(k)})
            for r in records
        ]
    best = run_dir / BEST
    found[BEST] = yaml.safe_load(best.read_text()) if best.is_file() else None
    return found


class TuneVictim(Victim):
    """``det-ds autotune`` over two ZeRO stages. What it measures is time, so only what was measured is compared."""

    def __init__(self, here: Path, draw: random.Random) -> None:
        context = here / "context"
        shutil.copytree(OWN_MODEL, context)
        options = ["--budget", "2", "--over", "zero_stage", "--steps", "5", "--warmup", "1", "--slots", "1"]
        super().__init__(
            "autotune", here, ["autotune", str(context / "experiment.yaml"), str(context), *options]
        )

    @property
    def resumes(self) -> bool:
        """The same command goes on."""
        return False

    def compare(self) -> list[str]:
        whole, killed = (
            sorted((row.name, str(row.status)) for row in load_results(folder / "results.json").rows)
            for folder in (self.whole_dir, self.run_dir)
        )
        return [] if whole == killed else [f"{whole} and {killed}"]


VICTIMS = {"run": RunVictim, "search": SearchVictim, "autotune": TuneVictim}
