"""Runs of ``own_model``, and what they leave in their run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from determined_ds import load_state_dict_from_checkpoint_path
from determined_ds.cli.main import main
from tests.harness.command import det_ds
from tests.package import checkpoints, records

OWN_MODEL = Path(__file__).with_name("own_model")
OWN_SCRIPT = Path(__file__).with_name("own_script")
LENGTH = "hyperparameters.fit.max_length.batches"
# In the trial's ``loss``; what stands before it is done in each batch.
LOSS = "        inputs_B4, targets_B1 = batch\n"


def run(context: Path, run_dir: Path, *options: str | Path, sets: Iterable[str] = ()) -> Any:
    """``det-ds run`` of a context directory to its end, in processes of its own."""
    words = [word for override in sets for word in ("--set", override)]
    return det_ds("run", context / "experiment.yaml", context, "--run-dir", run_dir, *options, *words)


def invoke(command: str, context: Path, *words: str | Path) -> Result:
    """A command on a context directory, in this process: for what starts no rank."""
    there = [command, str(context / "experiment.yaml"), str(context)]
    result = CliRunner().invoke(main, [*there, *map(str, words), "--accelerator", "cpu"])
    assert "Traceback" not in result.output
    return result


def edit(file: Path, before: str, after: str) -> None:
    """Change the one passage that reads so."""
    text = file.read_text()
    assert text.count(before) == 1, before
    file.write_text(text.replace(before, after))


def steps(run_dir: Path, group: str = "training") -> list[int]:
    """The batches that were reported, in the order of the file."""
    return [step for step, _ in records(run_dir, group)]


def losses(run_dir: Path) -> dict[int, float]:
    """The training loss of each batch; one that is reported twice fails."""
    found = [(step, metrics["loss"]) for step, metrics in records(run_dir, "training")]
    assert len(dict(found)) == len(found)
    return dict(found)


def result(run_dir: Path) -> Any:
    """What its ``result.json`` says."""
    return json.loads((run_dir / "result.json").read_text())


def steps_of(checkpoint: Path) -> int:
    """The batch at which a checkpoint was written."""
    return int(json.loads((checkpoint / "metadata.json").read_text())["steps_completed"])


def at(run_dir: Path, batch: int) -> Path:
    """The checkpoint of a batch."""
    (found,) = [path for path in checkpoints(run_dir) if steps_of(path) == batch]
    return found


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same weights, bit for bit."""
    left, right = map(load_state_dict_from_checkpoint_path, (one, other))
    return all(torch.equal(left[name], right[name]) for name in left.keys() | right.keys())


def contents(run_dir: Path) -> dict[str, bytes]:
    """Every file of a run but its ranks' logs, and the lock that tells who wrote to it last."""
    files = {str(path.relative_to(run_dir)): path for path in run_dir.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(("logs", ".lock"))}
