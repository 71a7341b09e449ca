"""A file of a sealed checkpoint that is not what it should be is an error with its name, and none of it is executed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.harness.ranks import Ranks
from tests.package import checkpoints, reseal
from tests.train.small import fit, hyperparameters, linear_trial


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not be printed",)


def harmful(file: Path) -> None:
    torch.save(Harmful(), file)


def piece(position: int, value: Any) -> Callable[[Path], None]:
    """Another value in the first piece of a tensor: file, offset, start or count."""

    def change(file: Path) -> None:
        index = json.loads(file.read_text())
        index["tensors"]["weight"]["states"]["weight"]["pieces"][0][position] = value
        file.write_text(json.dumps(index))

    return change


SETTINGS, PART = "model0/settings_stage0.pt", "det_state_dict_rank0.pth"
STATE, INDEX = "trial_state.json", "model0/index.json"
# A file, what is done to it (or what it holds then), and what is said of it.
CASES: dict[str, tuple[str, Any, str]] = {
    "junk": (SETTINGS, b"junk", "settings_stage0.pt is not what torch.save wrote"),
    "harmful settings": (SETTINGS, harmful, "could run code, and is not loaded"),
    "a part that is missing": (PART, Path.unlink, "det_state_dict_rank0.pth is missing"),
    "a harmful part": (PART, harmful, "could run code, and is not loaded"),
    "words for a number": (STATE, b'{"batches_trained": "4"}', "batches_trained = '4'"),
    "half an index": (INDEX, b'{"version": 1', "index.json cannot be read: Invalid JSON"),
    "slices outside": (INDEX, piece(0, "../det_state_dict_rank0.pth"), "is not the name of a file in this"),
    "slices with a gap": (INDEX, piece(2, 1), "lacks elements 0 to 1 of weight (weight)"),
    "slices behind the end": (INDEX, piece(1, 10**9), "ends before elements 0 to "),
}


def train(run_dir: Path, reads: bool = False, resume: list[Path] | None = None) -> list[str]:
    """In a rank: train two batches from each of these checkpoints. Returns what was raised, or what the trial noted.

    A trial that ``reads`` has a ``load`` which reads an object of its own, and DeepSpeed saves its engine.
    """
    from determined_ds import DeterminedDSError

    noted: list[str] = []

    class Reads(linear_trial()):  # type: ignore[misc]
        def save(self, context: Any, path: Path) -> None:
            self.engine.save_checkpoint(str(path), tag="own")

        def load(self, context: Any, path: Path) -> None:
            noted.append(torch.load(run_dir / "own.pt", weights_only=False).name)
            self.engine.load_checkpoint(str(path), tag="own")

    run_dir.mkdir(exist_ok=True)
    torch.save(Path("anything"), run_dir / "own.pt")
    said, kind = [], Reads if reads else linear_trial()
    for path in resume or [None]:
        noted.clear()
        try:
            latest = path and str(path)
            fit(
                run_dir, kind, hparams=hyperparameters(1), max_length=("batches", 2), latest_checkpoint=latest
            )
            said.append(", ".join(noted))
        except DeterminedDSError as error:
            said.append(str(error))
    return said


def test_a_resume_names_it(one_rank: Ranks, tmp_path: Path) -> None:
    """The manifest of each is that of its files as they are."""
    assert one_rank.run(train, tmp_path / "run") == [[""]]
    [whole] = checkpoints(tmp_path / "run")
    paths = [tmp_path / str(number) for number in range(len(CASES))]
    for path, (name, change, _) in zip(paths, CASES.values(), strict=True):
        shutil.copytree(whole, path)
        file = path / name
        file.write_bytes(change) if isinstance(change, bytes) else change(file)
        reseal(path)
    before = len(one_rank.said(0))
    [[*found, at_last]] = one_rank.run(train, tmp_path / "run", False, [*paths, whole])
    assert "must not be printed" not in one_rank.said(0)[before:]
    assert at_last == "", "the same checkpoint as it was written"
    for said, (case, (_, _, expected)) in zip(found, CASES.items(), strict=True):
        assert (expected in said, "\n  fix: " in said) == (True, True), (case, said)


def test_a_trial_may_load_objects_of_its_own(one_rank: Ranks, tmp_path: Path) -> None:
    """Only files of the checkpoint are held to be data, also those that DeepSpeed reads."""
    assert one_rank.run(train, tmp_path / "run", True) == [[""]]
    [whole] = checkpoints(tmp_path / "run")
    with_code = shutil.copytree(whole, tmp_path / "harmful")
    harmful(next((with_code / "own").glob("*model_states.pt")))
    reseal(with_code)
    [[own, of_harmful]] = one_rank.run(train, tmp_path / "again", True, [whole, with_code])
    assert own == "anything"
    assert "could run code, and is not loaded" in of_harmful
