"""A strategy that a machine cannot hold is refused from a checkpoint's index, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator, assumed_cuda
from determined_ds.config.reconcile import reconcile
from determined_ds.documents.document import Document
from determined_ds.launch.room_in_memory import no_room
from determined_ds.protocol.tensor_index import (
    BUFFER,
    FROZEN,
    TRAINED,
    EngineIndex,
    StoredTensor,
    write_index,
)

MILLION = 1_000_000
CPU = Accelerator(name="cpu", num_devices=4, bf16=False, fp16=False)


def checkpoint(folder: Path) -> Path:
    """Of a million trained parameters, as many that are frozen, and a buffer that does not count."""
    tensors = {
        name: StoredTensor(shape=(MILLION,), kind=kind, states={})
        for name, kind in (("a", TRAINED), ("b", FROZEN), ("c", BUFFER))
    }
    (folder / "model0").mkdir(parents=True)
    write_index(folder / "model0", EngineIndex(tensors=tensors))
    return folder


def told(folder: Path, stage: int, accelerator: Accelerator, **memory: Any) -> list[str]:
    ds = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    hparams = Document(name="hyperparameters", data={"global_batch_size": 8})
    resolved = reconcile(hparams, Document(name="json", data=ds), slots=4, accelerator=accelerator)
    where = {"gpu_bytes": None, "host_bytes": 10**12, **memory}
    return [str(problem) for problem in no_room(checkpoint(folder), resolved, accelerator, **where)]


@pytest.mark.parametrize(("stage", "fits"), [(0, False), (3, True)])
def test_a_gpu_holds_the_states_of_a_rank(stage: int, fits: bool, tmp_path: Path) -> None:
    """In fp32 under ZeRO 0 that is 4 bytes of each parameter, and 12 of each trained one: 20 MB."""
    found = told(tmp_path, stage, assumed_cuda(4), gpu_bytes=18 * MILLION)
    assert (found == []) is fits
    if not fits:
        assert "a rank" in found[0]
        assert "fix: use " in found[0]


def test_on_cpus_all_ranks_share_the_machine(tmp_path: Path) -> None:
    assert told(tmp_path / "fits", 0, CPU, host_bytes=81 * MILLION) == []
    [refused] = told(tmp_path / "refused", 0, CPU, host_bytes=79 * MILLION)
    assert "4 ranks share it" in refused


def test_an_unknown_gpu_and_a_checkpoint_without_an_index_refuse_nothing(tmp_path: Path) -> None:
    assert told(tmp_path, 0, assumed_cuda(4)) == []
    (tmp_path / "empty").mkdir()
    hparams = Document(name="hyperparameters", data={"global_batch_size": 8})
    ds = Document(name="json", data={"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    resolved = reconcile(hparams, ds, slots=4, accelerator=CPU)
    assert list(no_room(tmp_path / "empty", resolved, CPU, gpu_bytes=1, host_bytes=1)) == []
