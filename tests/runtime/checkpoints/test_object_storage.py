"""Checkpoints in S3, GCS and Azure: written by two ranks, verified, resumed bit for bit, by Determined's managers."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.checkpoint_files import MANIFEST, METADATA, damage_of
from tests.object_storage import clients_of, manager_of
from tests.ranks import Ranks
from tests.runtime.victim import differences, last_words

STRATEGIES: dict[str, dict[str, Any]] = {"zero1": {"zero": 1}, "zero3": {"zero": 3}, "pipeline": {"pipe": 2}}
TYPES = ("s3", "gcs", "azure")


@pytest.fixture
def storage_of(s3: dict[str, Any], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """``storage_of("s3")``: a ``checkpoint_storage`` of that type, empty."""

    def storage(kind: str) -> dict[str, Any]:
        return {
            "s3": {**s3, "prefix": tmp_path.name},
            "gcs": {"type": "gcs", "bucket": "checkpoints", "prefix": "some/where"},
            "azure": {"type": "azure", "container": "checkpoints", "connection_string": "a folder"},
        }[kind]

    return storage


def objects_of(tmp_path: Path) -> Path:
    """Where GCS and Azure keep theirs."""
    return tmp_path / "objects"


@contextlib.contextmanager
def opened(folder: Path, storage: dict[str, Any], *, zero: int = 1, pipe: int = 1) -> Iterator[Any]:
    """In a rank: a trial whose checkpoints go to object storage, by Determined's own core context."""
    from determined import core

    from determined_ds import open_context
    from tests.runtime.victim import PipelineVictim, Victim

    ds_config = {
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 8, "pipe_parallel_size": pipe, "deepspeed_config": ds_config}
    with (
        clients_of(storage, folder.parent / "objects"),
        open_context(hparams=hparams, run_dir=str(folder), accelerator="cpu") as context,
    ):
        manager = manager_of(storage, folder / "tmp")
        context._core.checkpoint = core.DummyCheckpointContext(context.distributed, manager)
        yield (Victim if pipe == 1 else PipelineVictim)(context)


def train(
    run_dir: str, storage: dict[str, Any], batches: int, latest: str | None = None, **how: Any
) -> tuple[list[str], str]:
    """In a rank: train so far. Returns the checkpoints that were written, and what was raised."""
    from determined.pytorch import Batch

    from determined_ds import DeterminedDSError, Trainer

    limit = how.pop("save_total_limit", None)
    written: list[str] = []
    with opened(Path(run_dir), storage, **how) as trial:
        trial.remembering.on_checkpoint_upload_end = lambda uuid: written.append(uuid)
        try:
            Trainer(trial, trial.context).fit(
                max_length=Batch(batches),
                checkpoint_period=Batch(3),
                reporting_period=Batch(3),
                validation_period=Batch(3),
                save_total_limit=limit,
                latest_checkpoint=latest,
            )
        except DeterminedDSError as error:
            return written, str(error)
    return written, ""


def fetched(storage: dict[str, Any], uuid: str, run_dir: Path) -> Path:
    """Download a checkpoint to where ``last_words`` looks for it."""
    path = run_dir / "checkpoints" / uuid
    with clients_of(storage, objects_of(run_dir.parent)):
        manager_of(storage, run_dir / "tmp").download(uuid, path)
    return path


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [*(("s3", strategy) for strategy in STRATEGIES), ("gcs", "zero1"), ("azure", "zero1")],
)
def test_resumed_it_ends_as_if_never_interrupted(
    kind: str, strategy: str, storage_of: Callable[[str], dict[str, Any]], two_ranks: Ranks, tmp_path: Path
) -> None:
    storage, how = storage_of(kind), STRATEGIES[strategy]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    [(uuids, said), _] = two_ranks.run(train, str(whole), storage, 6, **how)
    assert (len(uuids), said) == (2, "")
    expected = fetched(storage, uuids[-1], whole)

    [(uuids, said), _] = two_ranks.run(train, str(parts), storage, 3, **how)
    assert (len(uuids), said) == (1, "")
    [(uuids, said), _] = two_ranks.run(train, str(parts), storage, 6, uuids[-1], **how)
    assert (len(uuids), said) == (1, "")
    found = fetched(storage, uuids[-1], parts)
    assert damage_of(found) is None
    assert (found / METADATA).read_bytes() == (expected / METADATA).read_bytes()
    assert json.loads((found / METADATA).read_text())["steps_completed"] == 6
    assert differences(last_words(whole), last_words(parts)) == []
    assert not list((parts / "tmp").iterdir())  # nothing of a checkpoint stays on the machine


def test_the_limit_of_checkpoints_holds_there_too(
    storage_of: Callable[[str], dict[str, Any]], one_rank: Ranks, tmp_path: Path
) -> None:
    storage = storage_of("gcs")
    [(uuids, _)] = one_rank.run(train, str(tmp_path / "run"), storage, 9, save_total_limit=2)
    left = {uuid for uuid in uuids for file in objects_of(tmp_path).iterdir() if uuid in file.name}
    assert (len(uuids), len(left), uuids[-1] in left) == (3, 2, True)


# What is done to an object of a checkpoint -> what is then said of it; "" where it loads all the same.
SETTINGS, PART = "model0/settings_stage0.pt", "det_state_dict_rank1.pth"
WEIGHTS = "model0/rank0.safetensors"
DAMAGES = {
    **{(name, "missing"): f"{name} is missing" for name in (SETTINGS, PART, WEIGHTS, MANIFEST)},
    **{(name, "flipped"): f"{name} is not what was written" for name in (PART, WEIGHTS, MANIFEST, METADATA)},
    **{(name, "torn"): f"{name} has " for name in (PART, WEIGHTS)},
    (METADATA, "missing"): "",
    (METADATA, "of the master"): "",
}


def load_damaged(
    run_dir: str, storage: dict[str, Any], cases: list[tuple[str, str]]
) -> list[tuple[tuple[str, str], str]]:
    """In a rank: write a checkpoint; load it as it is, and again with each damage. Returns what was said of each."""
    from determined_ds.errors import CheckpointError
    from determined_ds.runtime.checkpoints.saving import Checkpoints
    from determined_ds.runtime.checkpoints.trial_state import TrialState

    said = []
    with opened(Path(run_dir), storage) as trial:
        context = trial.context
        checkpoints = Checkpoints(trial, context, {}, {})
        context._current_batch_idx = 3
        uuid = checkpoints.save(TrialState(batches_trained=4))
        manager, copy = context._core.checkpoint._storage_manager, Path(run_dir, "copy")
        if context.distributed.rank == 0:
            manager.download(uuid, copy)
        for name, damage in [("nothing", "damaged"), *cases]:
            if context.distributed.rank == 0 and name != "nothing":
                put(manager, uuid, copy, name, damage)
            context.distributed.allgather(None)
            try:
                checkpoints.load(uuid, trial_id=0)
                said.append(((name, damage), ""))
            except CheckpointError as error:
                said.append(((name, damage), str(error)))
            context.distributed.allgather(None)
            if context.distributed.rank == 0 and name != "nothing":
                put(manager, uuid, copy, name, "whole")
    return said


def put(manager: Any, uuid: str, copy: Path, name: str, damage: str) -> None:
    """Replace an object of a checkpoint, or delete it."""
    if damage == "missing":
        manager.delete(uuid, [name])
        return
    content = (copy / name).read_bytes()
    middle = len(content) // 2
    if damage == "flipped":
        content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    elif damage == "torn":
        content = content[:middle]
    elif damage == "of the master":  # sorted by key, with what somebody has added in the web UI
        content = json.dumps({**json.loads(content), "notes": "mine"}, sort_keys=True, indent=2).encode()
    changed = copy.with_name("changed")
    (changed / name).parent.mkdir(parents=True)
    (changed / name).write_bytes(content)
    manager.upload(changed, uuid, {name})
    shutil.rmtree(changed)


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_damaged_or_missing_is_found_by_all_ranks_before_anything_is_loaded(
    kind: str, storage_of: Callable[[str], dict[str, Any]], two_ranks: Ranks, tmp_path: Path
) -> None:
    """As on a disk; ``metadata.json`` alone may be missing, or be the one that the master gives."""
    told = two_ranks.run(load_damaged, str(tmp_path / "run"), storage_of(kind), list(DAMAGES))
    assert told[0] == told[1]
    expected = {("nothing", "damaged"): "", **DAMAGES}
    for case, said in told[0]:
        assert expected[case] in said, case
        assert bool(said) == bool(expected[case]), (case, said)
        assert ("is damaged" in said) == bool(said)
    assert len(told[0]) == len(expected)


def test_one_that_is_gone_is_named(
    storage_of: Callable[[str], dict[str, Any]], one_rank: Ranks, tmp_path: Path
) -> None:
    uuid = "0b5e6c1e-0000-4000-8000-000000000000"
    [(_, said)] = one_rank.run(train, str(tmp_path / "run"), storage_of("s3"), 6, uuid)
    assert f"checkpoint {uuid} is not in checkpoint_storage" in said
