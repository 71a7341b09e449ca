"""Which checkpoint ``best``, ``last``, a uuid and a path mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from determined_ds.protocol.checkpoint_files import INDEX, files_of, fingerprint, write_manifest
from determined_ds.protocol.named_checkpoint import NotFound, best_checkpoint, find
from determined_ds.protocol.run_dir import RunDir

METRIC = "accuracy"


def checkpoint(run: Path, uuid: str, steps: int) -> Path:
    folder = run / "checkpoints" / uuid
    folder.mkdir(parents=True)
    (folder / "weights").write_text(uuid)
    marks = {name: fingerprint(folder / name) for name in files_of(folder)}
    write_manifest(folder, marks, {"steps_completed": steps})
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with checkpoints at batch 2, 4 and 6, and validations at 1 to 6: 3 is the best, then 4."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs/mine/now"
    for steps in (2, 4, 6):
        checkpoint(path, f"uuid{steps}", steps)
    validations = zip(range(1, 7), (0.1, 0.2, 0.9, 0.8, 0.4, "NaN"), strict=True)
    records = [
        {"group": "validation", "steps_completed": at, "metrics": {METRIC: v}} for at, v in validations
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (path / "experiment.yaml").write_text(f"searcher: {{metric: {METRIC}, smaller_is_better: false}}\n")
    return RunDir(path)


@pytest.mark.parametrize(
    ("given", "uuid"),
    [
        ("best", "uuid4"),
        ("last", "uuid6"),
        ("uuid2", "uuid2"),
        ("runs/mine/now", "uuid6"),
        ("runs/mine/now/checkpoints/uuid2", "uuid2"),
    ],
)
def test_a_word_means_an_intact_checkpoint(run: RunDir, given: str, uuid: str) -> None:
    assert find(given, run).checkpoint.uuid == uuid
    if given not in ("best", "last"):
        assert find(given).checkpoint.uuid == uuid


def test_the_best_is_the_best_validated_one_that_is_kept(run: RunDir) -> None:
    found = best_checkpoint(run)
    assert found is not None
    assert (found.uuid, found.steps_completed) == ("uuid4", 4)
    run.experiment.write_text("searcher: {metric: another}\n")
    assert best_checkpoint(run) is None
    with pytest.raises(NotFound, match=r"has a validation of searcher\.metric"):
        find("best", run)
    run.result.write_text(json.dumps({"status": "completed", "best": {"checkpoint": "uuid2"}}))
    assert find("best", run).checkpoint.uuid == "uuid2", "as its result says"


def test_the_last_is_the_newest_good_one_and_what_is_damaged_is_said(run: RunDir) -> None:
    (run.checkpoints / "uuid6/weights").write_text("other")
    found = find("last", run)
    assert found.checkpoint.uuid == "uuid4"
    assert "uuid6 is damaged: weights" in found.damages[0]
    assert find(str(run.path)) == found
    with pytest.raises(NotFound, match="cannot be loaded: weights"):
        find("uuid6", run)


def test_one_in_another_storage_is_meant_only_where_it_can_be_fetched(run: RunDir) -> None:
    (run.checkpoints / "uuid2" / INDEX).write_text("{}")
    assert find("uuid2", run, stored_too=True).checkpoint.uuid == "uuid2"
    with pytest.raises(NotFound, match="is in checkpoint_storage"):
        find("uuid2", run)


def test_a_uuid_is_looked_up_in_the_run_below_runs_and_beside_the_run(run: RunDir, tmp_path: Path) -> None:
    trial = checkpoint(tmp_path / "runs/search/now/trials/3", "ofatrial", 1)
    beside = checkpoint(tmp_path / "elsewhere/other", "beside", 1)
    assert find("ofatrial").checkpoint.path == trial
    assert find("beside", RunDir(tmp_path / "elsewhere/new")).checkpoint.path == beside
    for given in ("beside", "nowhere", "best", "runs/other", "x" * 5000, "a\0b"):
        with pytest.raises(NotFound):
            find(given)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "det-ds checkpoint import"),
        ("pytorch_model-00001-of-00002.bin", "det-ds checkpoint import"),
        ("latest_universal", "universal checkpoint of DeepSpeed's"),
        ("anything", "metadata.json is missing"),
    ],
)
def test_a_folder_of_another_program_is_called_what_it_is(tmp_path: Path, file: str, said: str) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / file).write_bytes(b"x")
    with pytest.raises(NotFound, match=said):
        find(str(folder))
    with pytest.raises(NotFound, match="is a file, and a checkpoint is a folder"):
        find(str(folder / file))
