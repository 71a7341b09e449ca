"""Scripts in the manner of DeepSpeed's public examples, as they are and ported: fewer than ten lines differ."""

from __future__ import annotations

import difflib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import ROOT, det_ds
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words

SCRIPTS = Path(__file__).parent / "scripts"
# Script -> its function that trains, lines that the port changes, arguments under which both train the same.
PORTS: dict[str, tuple[str, int, list[str]]] = {
    "cifar10": ("main", 8, []),
    "bert": ("train", 8, ["--dropout", "0"]),
    "alexnet": ("train_pipe", 9, ["--dropout", "0"]),
}


def changed_lines(before: str, after: str) -> int:
    """Lines that were changed, added or taken out; blank ones do not count."""
    lines = [[line for line in text.splitlines() if line.strip()] for text in (before, after)]
    codes = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in codes if kind != "equal")


@pytest.mark.parametrize("name", PORTS)
def test_fewer_than_ten_lines_change(name: str) -> None:
    before, after = ((SCRIPTS / f"{name}_{kind}.py").read_text() for kind in ("plain", "ported"))
    assert changed_lines(before, after) == PORTS[name][1] < 10


# --------------------------------------------------------------------------------------- the same losses


def ported_losses(name: str, function: str, words: list[str], run_dir: str) -> tuple[list[float], int]:
    """In a rank: the losses of the ported script, and the seed of its data."""
    import determined_ds

    os.chdir(SCRIPTS)
    script = runpy.run_path(str(SCRIPTS / f"{name}_ported.py"))
    with determined_ds.session(f"{name}.yaml", run_dir=run_dir, accelerator="cpu") as s:
        losses = script[function](script["get_arguments"](words), s)
        return losses, s.context.get_trial_seed()


def plain_losses(name: str, function: str, words: list[str], seed: int) -> list[float]:
    """In a rank: the losses of the plain script, its data in the order of a session with that seed."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    deepspeed.DeepSpeedEngine.deepspeed_io = lambda engine, dataset, **_: Ordered(engine, dataset, seed)
    script = runpy.run_path(str(SCRIPTS / f"{name}_plain.py"))
    return script[function](script["get_arguments"](words))  # type: ignore[no-any-return]


class Ordered:
    """What an engine's own loader is for a script, in the order of a session."""

    def __init__(self, engine: Any, dataset: Any, seed: int) -> None:
        from determined.pytorch import DataLoader

        from tests.package import training_data

        replicas, size = engine.dp_world_size, engine.train_micro_batch_size_per_gpu()
        accumulation = engine.gradient_accumulation_steps()
        loader = DataLoader(dataset, size, shuffle=True, drop_last=True)
        replica = engine.global_rank if replicas > 1 else 0
        self._data = training_data(loader, (replicas, accumulation, size), replica=replica, seed=seed)
        self._per_pass = (self._data.batches_per_epoch or 0) * accumulation

    def __iter__(self) -> Any:
        for _ in range(self._per_pass):
            yield next(self._data.batches)


@pytest.mark.parametrize("name", PORTS)
def test_both_train_to_the_same_losses(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """Where the order of the data is the same, and no dropout is drawn, whose generators a session seeds anew."""
    function, _, words = PORTS[name]
    ported = two_ranks.run(ported_losses, name, function, words, str(tmp_path / "run"))
    plain = two_ranks.run(plain_losses, name, function, words, ported[0][1])
    assert [losses for losses, _ in ported] == plain
    assert plain[0][-1] < plain[0][0]


# --------------------------------------------------------------------------------------- as runs


def run(name: str, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return det_ds("run", SCRIPTS / f"{name}.yaml", SCRIPTS, "--run-dir", run_dir, *options)


@pytest.mark.parametrize("name", PORTS)
def test_the_port_is_run_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    """To the end, and in two parts: the metrics and the last checkpoint are the same to the bit."""
    whole = run(name, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    forget_after(tmp_path / "parts", 4)
    rest = run(name, tmp_path / "parts", "--resume")
    assert rest.returncode == 0, rest.stderr
    assert "resumed at batch" in rest.stdout
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "parts")) == []


def forget_after(run_dir: Path, batch: int) -> None:
    """Take away the checkpoints after a batch, as if the run had been killed before it had written them."""
    for metadata in (run_dir / "checkpoints").glob("*/metadata.json"):
        if json.loads(metadata.read_text())["steps_completed"] > batch:
            shutil.rmtree(metadata.parent)


@pytest.mark.long("test_both_train_to_the_same_losses and test_own_run, in one process each")
@pytest.mark.parametrize("kind", ["plain", "ported"])
@pytest.mark.parametrize("name", PORTS)
def test_the_script_runs_under_torchrun(name: str, kind: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for file in SCRIPTS.glob(f"{name}*"):
        (scripts / file.name).write_bytes(file.read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, f"{name}_{kind}.py"]
    done = subprocess.run(command, cwd=scripts, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(scripts.glob("runs/*/*/result.json"))) == (kind == "ported")
