"""``--evaluate`` and ``--predict``: which checkpoint they mean, and what is refused before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from determined_ds.errors import ConfigError
from determined_ds.launch import which_weights
from determined_ds.launch.options import RunOptions
from determined_ds.launch.which_weights import check_options, folder_of_results, weights_to_read
from determined_ds.protocol.checkpoint_files import files_of, fingerprint, write_manifest

TRIAL: Any = SimpleNamespace(script=None)


def options(**given: Any) -> RunOptions:
    return RunOptions(config=Path("mine.yaml"), **given)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints, the second of them the best."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/mine/now"
    for steps in (2, 4, 6):
        folder = run / f"checkpoints/uuid{steps}"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(steps))
        marks = {name: fingerprint(folder / name) for name in files_of(folder)}
        write_manifest(folder, marks, {"steps_completed": steps})
    result = {"status": "completed", "best": {"checkpoint": "uuid4", "metric": "m", "value": 1}}
    (run / "result.json").write_text(json.dumps(result))
    return run


@pytest.mark.parametrize(
    ("given", "stated", "uuid"),
    [
        ("best", True, "uuid4"),
        ("last", True, "uuid6"),
        ("uuid2", True, "uuid2"),
        ("uuid2", False, "uuid2"),
        ("runs/mine/now", False, "uuid6"),
        ("runs/mine/now/checkpoints/uuid2", False, "uuid2"),
    ],
)
def test_a_checkpoint_is_named(given: str, stated: bool, uuid: str, run: Path) -> None:
    found = weights_to_read(options(evaluate=given, run_dir=run if stated else None))
    assert found.uuid == uuid
    there = folder_of_results(run, options(evaluate=given), found)
    assert there == run / "evaluated" / uuid, "a training stays as it is"
    assert folder_of_results(run.parent / "new", options(evaluate=given), found) == run.parent / "new"


def test_a_prediction_is_by_the_best_and_without_a_run_needs_a_name(run: Path) -> None:
    assert weights_to_read(options(predict=Path("p.csv"), run_dir=run)).uuid == "uuid4"
    (run / "result.json").unlink()
    assert weights_to_read(options(predict=Path("p.csv"), run_dir=run)).uuid == "uuid6"
    with pytest.raises(ConfigError, match="needs the weights of a checkpoint"):
        weights_to_read(options(predict=Path("p.csv")))


def test_what_is_not_there_or_damaged_is_refused(run: Path) -> None:
    for given in ("nowhere", "best", "runs/other"):
        with pytest.raises(ConfigError, match="there is no such checkpoint"):
            weights_to_read(options(evaluate=given))
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        weights_to_read(options(evaluate="last", run_dir=run.parent))
    (run / "checkpoints/uuid2/weights").write_text("other")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        weights_to_read(options(evaluate="uuid2", run_dir=run))


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({"evaluate": "best", "test": True}, "--evaluate", "together with --test"),
        ({"evaluate": "best", "predict": Path("p.csv")}, "--predict", "together with --predict"),
        ({"predict": Path("p.txt")}, "--predict", "must end in .jsonl"),
        ({"predict": Path("nowhere/p.csv")}, "--predict", "its folder does not exist"),
        ({"predict": Path("p.parquet")}, "--predict", "needs pyarrow"),
        ({"checkpoint": "best"}, "--checkpoint", "is for --predict"),
    ],
)
def test_what_cannot_be_asked_together(
    given: dict[str, Any], key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(which_weights.importlib.util, "find_spec", lambda name: None)
    (problem,) = check_options(options(**given), TRIAL, None)
    assert problem.key == key
    assert said in problem.message


def test_a_script_and_a_pipeline_are_refused() -> None:
    script: Any = SimpleNamespace(script="train.py")
    (problem,) = check_options(options(evaluate="best"), script, None)
    assert "runs trials" in problem.message
    pipeline: Any = SimpleNamespace(topology=SimpleNamespace(pipe_parallel_size=2))
    (problem,) = check_options(options(predict=Path("p.csv")), TRIAL, pipeline)
    assert "pipeline" in problem.message
    assert not list(check_options(options(evaluate="best"), TRIAL, pipeline))
