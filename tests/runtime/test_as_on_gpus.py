"""What a GPU is given trains here too, on a CPU that is said to have fp16 and counts its synchronizations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from determined_ds.config.reconcile import reconcile
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.runtime.checkpoints.contents import only_data, to_their_kind_of_device
from determined_ds.runtime.checkpoints.parts import RankParts
from tests.making import CUDA
from tests.ranks import Ranks

GLOBAL_BATCH_SIZE, ACCUMULATION, NUM_BATCHES = 8, 2, 6
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


def config_of_gpus(stage: int, **sections: Any) -> dict[str, Any]:
    """All that DeepSpeed is given on one GPU."""
    ds = {
        "optimizer": ADAM,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        **sections,
    }
    hparams = Document(name="hp", data={"global_batch_size": GLOBAL_BATCH_SIZE}, prefix="hyperparameters")
    return reconcile(hparams, Document(name="ds.json", data=ds), slots=1, accelerator=CUDA).ds_config


@contextmanager
def fp16_and_counted() -> Iterator[list[int]]:
    """This rank's CPU is said to train in fp16; the list grows by one at each synchronization of the device."""
    from deepspeed.accelerator import get_accelerator

    from determined_ds.runtime import opening

    kind, counted = type(get_accelerator()), [0]
    cpu = replace(detect_accelerator("cpu"), fp16=True)

    def synchronize(*args: Any) -> None:
        counted[0] += 1

    with (
        patch.object(kind, "is_fp16_supported", lambda self: True),
        patch.object(kind, "synchronize", synchronize),
        patch.object(opening, "detect_accelerator", lambda name: cpu),
    ):
        yield counted


def train(run_dir: str, ds_config: dict[str, Any]) -> list[int]:
    """In a rank: train with a report every batch; synchronizations in each of the micro-batches."""
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    steps: list[int] = []

    class Linear(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 2)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            (inputs,) = batch
            outputs = model(inputs.to(next(model.parameters()).dtype))
            return torch.nn.functional.mse_loss(outputs.float(), inputs[:, :2])

        def train_batch(self, *args: Any) -> Any:
            before = counted[0]
            metrics = super().train_batch(*args)
            steps.append(counted[0] - before)
            return metrics

        def build_training_data_loader(self) -> Any:
            inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
            return self.training_loader(torch.utils.data.TensorDataset(inputs))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(torch.utils.data.TensorDataset(torch.randn(8, 4)))

    hparams = {"global_batch_size": GLOBAL_BATCH_SIZE, "deepspeed_config": ds_config}
    with fp16_and_counted() as counted, open_context(hparams=hparams, run_dir=run_dir) as context:
        Trainer(Linear(context), context).fit(max_length=Batch(NUM_BATCHES), reporting_period=Batch(1))
    return steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_reports_its_loss_scale_and_no_norm_of_a_skipped_step(
    stage: int, one_rank: Ranks, tmp_path: Path, metrics_of: Any
) -> None:
    """The first scales overflow; each optimizer of DeepSpeed's keeps the scale in a place of its own."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    one_rank.run(train, str(tmp_path), config_of_gpus(stage, fp16=fp16))
    reports = metrics_of(tmp_path, "training")
    assert len(reports) == NUM_BATCHES
    assert reports[0]["skipped_steps"] == 1
    assert "grad_norm" not in reports[0]
    assert reports[-1]["skipped_steps"] < NUM_BATCHES
    assert 0 < reports[-1]["grad_norm"] < float("inf")
    scales = [report["loss_scale"] for report in reports]
    assert scales[-1] == 2.0 ** (18 - reports[-1]["skipped_steps"])


@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_fp16_without_zero_is_the_same_training_as_with_it(
    clip: float, one_rank: Ranks, tmp_path: Path, metrics_of: Any
) -> None:
    """By SGD, which shows the size of a gradient that Adam hides: what is divided by a scale was multiplied by it."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}, "zero_allow_untested_optimizer": True}
    found: dict[int, list[dict[str, Any]]] = {}
    for stage in (0, 1):
        fp16 = {"enabled": True, "initial_scale_power": 10}
        run_dir = tmp_path / str(stage)
        one_rank.run(train, str(run_dir), config_of_gpus(stage, fp16=fp16, gradient_clipping=clip, **sgd))
        found[stage] = metrics_of(run_dir, "training")
    for name in ("loss", "grad_norm", "loss_scale"):
        expected = [report[name] for report in found[1]]
        assert [report[name] for report in found[0]] == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_step_waits_for_the_device(stage: int, one_rank: Ranks, tmp_path: Path) -> None:
    (counted,) = one_rank.run(train, str(tmp_path), config_of_gpus(stage, bf16={"enabled": True}))
    assert counted == [0] * NUM_BATCHES * ACCUMULATION


def test_a_timer_that_is_asked_for_waits(one_rank: Ranks, tmp_path: Path) -> None:
    """So the count counts: twice a micro-batch, from the third step on."""
    (counted,) = one_rank.run(
        train, str(tmp_path), config_of_gpus(1, timers={"throughput": {"enabled": True}})
    )
    assert counted == [0, 0, 0, 0] + [2] * (NUM_BATCHES * ACCUMULATION - 4)


def train_on_the_cpu_after_all(run_dir: str, ds_config: dict[str, Any]) -> tuple[str, str, int]:
    """In a rank whose DeepSpeed was imported on a machine with GPUs: what it computes on, and where its weights are."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())
    steps = train(run_dir, ds_config)
    return get_accelerator().device_name(), get_accelerator().communication_backend_name(), len(steps)


def test_deepspeed_that_was_imported_for_gpus_trains_on_the_cpu(one_rank: Ranks, tmp_path: Path) -> None:
    ds_config = config_of_gpus(1, bf16={"enabled": True})
    (found,) = one_rank.run(train_on_the_cpu_after_all, str(tmp_path), ds_config)
    assert found == ("cpu", "gloo", NUM_BATCHES * ACCUMULATION)


class Moved:
    """A storage that keeps where it was sent."""

    to = staticmethod(lambda device: f"on {device}")


@pytest.mark.parametrize(
    ("device", "location", "place"),
    [
        ("cuda:1", "cuda:3", "on cuda:1"),  # of the rank that wrote it, to the one that reads it
        ("cuda:1", "cpu", "stays"),
        ("cpu", "cuda:3", "stays"),  # torch has read it to the host
    ],
)
def test_what_was_on_a_gpu_comes_back_to_one(device: str, location: str, place: str) -> None:
    """A reducer that adds up on its device would fail at the first batch after a resume."""
    storage = Moved()
    found = to_their_kind_of_device(torch.device(device))(storage, location)
    assert found == place if place != "stays" else found is storage


def test_a_part_is_read_by_the_place_of_each_tensor(tmp_path: Path) -> None:
    torch.save({"sum": torch.ones(2), "rng": torch.ones(2, dtype=torch.uint8)}, tmp_path / "part.pth")
    place = to_their_kind_of_device(torch.device("meta"))
    read = torch.load(tmp_path / "part.pth", map_location=place, weights_only=True)
    assert {tensor.device.type for tensor in read.values()} == {"cpu"}
    place = to_their_kind_of_device(torch.device("cpu"))
    assert torch.load(tmp_path / "part.pth", map_location=place, weights_only=True)["sum"].sum() == 2


def test_a_resumed_rank_reads_its_part_so(tmp_path: Path) -> None:
    """The sum of a reducer goes to this rank's GPU, the states of generators stay on the host."""
    total, generator = torch.ones(4), torch.ones(2, dtype=torch.uint8)
    moved: list[tuple[torch.device, int]] = []

    def location(storage: torch.UntypedStorage) -> str:
        return "cuda:3" if storage.nbytes() == total.nbytes else "cpu"

    def to(storage: torch.UntypedStorage, *, device: torch.device) -> torch.UntypedStorage:
        moved.append((device, storage.nbytes()))
        return storage

    with patch.object(torch.serialization, "location_tag", location):
        torch.save({"sum": total, "rng": generator}, tmp_path / "det_state_dict_rank0.pth")
    device = torch.device("cuda:1")
    parts = object.__new__(RankParts)
    parts._here = SimpleNamespace(rank=0)  # type: ignore[assignment]
    parts._context = SimpleNamespace(device=device)
    with patch.object(torch.UntypedStorage, "to", to), only_data():
        part = parts._own(tmp_path, "uuid")
    assert moved == [(device, total.nbytes)]
    assert torch.equal(part["sum"], total)
    assert torch.equal(part["rng"], generator)
