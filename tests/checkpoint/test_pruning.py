"""Which checkpoints are deleted: never the best nor the newest intact one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from determined_ds.checkpoint.pruning import plan_pruning, remove
from determined_ds.errors import ConfigError
from determined_ds.protocol.checkpoint_files import INDEX, checkpoint_at, checkpoints_in, remove_partial
from tests.checkpoint.making import made

METRIC = "validation_loss"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at batch 1 to 6, the best at 2."""
    run = tmp_path / "run"
    records = []
    for steps in range(1, 7):
        made(run / f"checkpoints/at{steps}", {}, steps=steps)
        value = abs(steps - 2)
        records.append({"group": "validation", "steps_completed": steps, "metrics": {METRIC: value}})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (run / "experiment.yaml").write_text(f"searcher: {{metric: {METRIC}}}\n")
    return run


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (1, [6, 2]),
        (2, [6, 2]),
        (3, [6, 5, 2]),
        (5, [6, 5, 4, 3, 2]),
        (6, [6, 5, 4, 3, 2, 1]),
        (9, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_the_oldest_are_deleted_first(run: Path, keep: int, kept: list[int]) -> None:
    planned = plan_pruning(run, keep)
    assert [each.steps_completed for each in planned.kept] == kept
    assert sorted({*kept, *(each.steps_completed for each in planned.removed)}) == [1, 2, 3, 4, 5, 6]
    assert planned.best is not None
    assert (planned.best.uuid, planned.newest.uuid) == ("at2", "at6")


def test_what_is_damaged_is_not_the_newest_and_is_deleted_before_others(run: Path) -> None:
    for uuid in ("at6", "at5"):
        (run / f"checkpoints/{uuid}/model0/rank0.bin").write_bytes(b"")
    planned = plan_pruning(run, 4)
    assert [each.uuid for each in planned.removed] == ["at6", "at5"]
    assert planned.newest.uuid == "at4"
    assert len(planned.damages) == 2
    for each in checkpoints_in(run / "checkpoints"):
        (each.path / "model0/rank0.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="has no intact checkpoint"):
        plan_pruning(run, 1)


def test_one_that_is_half_deleted_is_incomplete(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # as if killed there
    remove(checkpoint_at(run / "checkpoints/at1"))
    monkeypatch.undo()
    assert "at1" not in [each.uuid for each in checkpoints_in(run / "checkpoints")]
    remove_partial(run / "checkpoints")
    assert len(list((run / "checkpoints").iterdir())) == 5


def test_what_is_in_another_storage_or_not_there_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints/at1" / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match="in checkpoint_storage"):
        plan_pruning(run, 1)
    with pytest.raises(ConfigError, match="has no checkpoints"):
        plan_pruning(tmp_path / "nowhere", 1)
    assert not (tmp_path / "nowhere").exists()
