"""What of a batch goes to the device, and what is said of the rest."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from determined import pytorch

from determined_ds import DataParallelTrial
from determined_ds.runtime.data.moving import Mover

META = torch.device("meta")  # a device that is not the CPU, on every machine
Pair = namedtuple("Pair", ["inputs", "targets"])


class Movable:
    """As an author's own batch class."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> Movable:
        moved = Movable()
        moved.device = device
        return moved


class Unmovable:
    pass


def batch() -> dict[str, Any]:
    return {
        "tensor": torch.ones(2),
        "array": np.ones(2, dtype=np.float32),
        "nested": [(torch.ones(1), {"deep": torch.ones(1)})],
        "movable": Movable(),
        7: "text",
    }


def test_all_that_determined_moves_is_moved() -> None:
    """Held against Determined's own function; what neither moves stays what it is."""
    ours, theirs = Mover(META).move(batch()), pytorch.to_device(batch(), META)
    assert list(ours) == list(theirs)
    for found in (ours, theirs):
        assert found["tensor"].device == found["array"].device == META
        assert found["nested"][0][0].device == found["nested"][0][1]["deep"].device == META
        assert found["movable"].device == META
        assert found[7] == "text"


def test_a_named_tuple_stays_one() -> None:
    moved = Mover(META).move(Pair(torch.ones(1), torch.ones(1)))
    assert moved.inputs.device == moved.targets.device == META


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"x": torch.ones(1), "names": ["a", "b"]}, "batch['names'][0] is the str 'a'"),
        ((torch.ones(1), Unmovable()), "batch[1] is an Unmovable"),
        ({"x": {3: np.array(["a"])}}, "batch['x'][3] is an array of <U1"),
        (Unmovable(), "batch is an Unmovable"),
    ],
)
def test_what_cannot_be_moved_is_named_by_its_place_once(
    data: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    mover = Mover(META)
    for _ in range(3):
        mover.move(data)
    [record] = caplog.records
    assert place in record.getMessage()
    assert "on meta" in record.getMessage()


def test_numbers_need_no_device(caplog: pytest.LogCaptureFixture) -> None:
    assert Mover(META).move([1, 2.5, None, True]) == [1, 2.5, None, True]
    assert not caplog.records


class Told(torch.Tensor):
    """Keeps what it was told to move by."""

    options: dict[str, Any]

    def to(self, device: torch.device, **options: Any) -> Told:  # type: ignore[override]
        self.options = options
        return self


@pytest.mark.parametrize(("device", "in_background"), [("cuda", True), ("cpu", False)])
def test_the_host_waits_for_no_copy_to_a_gpu(device: str, in_background: bool) -> None:
    tensor = torch.ones(2).as_subclass(Told)
    assert Mover(torch.device(device)).move({"tensor": tensor})["tensor"].options == {
        "non_blocking": in_background
    }


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize("make", ["training_loader", "validation_loader"])
def test_batches_for_a_gpu_are_pinned(make: str, device: str, pinned: bool) -> None:
    kind: Any = type("Whole", (DataParallelTrial,), {})
    kind.__abstractmethods__ = frozenset()
    trial = object.__new__(kind)
    trial.context = SimpleNamespace(device=torch.device(device))
    trial.resolved = SimpleNamespace(batch=SimpleNamespace(micro_batch_size=2))
    data = torch.utils.data.TensorDataset(torch.ones(8, 1))
    assert getattr(trial, make)(data).pin_memory is pinned
    assert getattr(trial, make)(data, pin_memory=not pinned).pin_memory is not pinned
