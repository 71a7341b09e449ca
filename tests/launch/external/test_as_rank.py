"""What a rank of another launcher decides for itself: its threads; and what rank 0 makes of the others' answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from determined_ds.errors import ConfigError
from determined_ds.launch.external import as_rank
from determined_ds.launch.external.placement import Placement
from determined_ds.launch.options import RunOptions
from determined_ds.launch.resuming import Start
from determined_ds.protocol.checkpoint_files import Checkpoint
from tests.ranks import ROOT

# What torchrun does where nobody has set it.
PARENT = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
ask = "from determined_ds.launch.external.as_rank import _stated_by_user; print(_stated_by_user('OMP_NUM_THREADS'))"
print(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's first environment is in /proc")
@pytest.mark.parametrize("stated", [True, False])
def test_threads_that_the_user_stated_are_told_from_those_that_torchrun_sets(stated: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": "1"} if stated else {}
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(stated)


def placed(launcher: str) -> Placement:
    return Placement(rank=0, size=2, local_rank=0, local_size=2, machine=0, machines=1, launcher=launcher)


def test_a_rank_that_has_cores_of_its_own_uses_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert as_rank._threads_given(placed("srun")) == 8
    assert as_rank._threads_given(placed("torchrun")) is None
    mine = {0: {3, 4}, os.getppid(): set(range(16))}  # by mpirun --bind-to
    monkeypatch.setattr(os, "sched_getaffinity", mine.__getitem__)
    assert as_rank._threads_given(placed("mpirun")) == 2
    mine[0] = mine[os.getppid()]
    assert as_rank._threads_given(placed("mpirun")) is None


@pytest.mark.parametrize(("restarts", "refused"), [("0", False), ("3", True)])
def test_an_earlier_checkpoint_is_not_named_where_torchrun_restarts(
    restarts: str, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be named again, and what was trained since would be superseded."""
    later = Checkpoint(uuid="later", steps_completed=4, path=tmp_path / "later")
    prepared = SimpleNamespace(start=Start(superseded=(later,)))
    monkeypatch.setattr(as_rank, "prepare_run", lambda options, placed: prepared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    options = RunOptions(config=tmp_path / "mine.yaml", run_dir=tmp_path, resume="earlier")
    if refused:
        with pytest.raises(ConfigError, match="leave --max-restarts out"):
            as_rank._decide(placed("torchrun"), options)
    else:
        assert as_rank._decide(placed("torchrun"), options) is prepared


@pytest.mark.parametrize(
    ("resume", "has_its_own", "resumed"),
    [(None, False, "last"), ("elsewhere", False, "elsewhere"), ("elsewhere", True, "last")],
)
def test_restarted_by_torchrun_a_run_resumes_from_its_own_checkpoints(
    resume: str | None, has_its_own: bool, resumed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if has_its_own:
        (tmp_path / "checkpoints/own").mkdir(parents=True)
    given: list[RunOptions] = []

    def prepared(options: RunOptions, placed: Placement) -> Any:
        given.append(options)
        return SimpleNamespace(start=Start())

    monkeypatch.setattr(as_rank, "prepare_run", prepared)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    options = RunOptions(config=tmp_path / "mine.yaml", run_dir=tmp_path, resume=resume)
    as_rank._decide(placed("torchrun"), options)
    assert given[0].resume == resumed


def answer(host: str, machine: int, **more: str) -> dict[str, Any]:
    return {"host": host, "machine": machine, "unshared": "", "problem": "", **more}


def test_what_is_wrong_on_other_machines_is_said_once_with_their_names() -> None:
    good = [answer("a", 0), answer("a", 0), answer("b", 1), answer("b", 1)]
    assert as_rank._problems(good, "run") == []
    in_turns = as_rank._problems([answer("a", 0), answer("b", 0)], "run")
    assert "ranks of machine 0 are on a, b" in str(in_turns[0])
    bad = [answer("a", 0), *(answer("b", 1, problem="CONFIG: no such file") for _ in range(8))]
    assert [str(problem) for problem in as_rank._problems(bad, "run")] == ["b: CONFIG: no such file"]
    apart = [answer("a", 0), answer("b", 1, unshared="sees nothing"), answer("c", 2, unshared="sees nothing")]
    [problem] = as_rank._problems(apart, "run")
    assert "b sees nothing; c sees nothing" in problem.message
