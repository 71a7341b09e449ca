"""What a checkpoint holds of each rank, read by another number of ranks: nothing is lost, and nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from determined import pytorch

from tests.harness.ranks import Ranks
from tests.package import checkpoints, records

GLOBAL = 8
SAMPLES = 24  # three batches an epoch


class Seen(pytorch.MetricReducer):
    """The samples of all ranks since the last report."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.samples: list[int] = []

    def per_slot_reduce(self) -> list[int]:
        return self.samples

    def cross_slot_reduce(self, per_slot_metrics: list[list[int]]) -> dict[str, Any]:
        seen = [sample for slot in per_slot_metrics for sample in slot]
        return {"count": len(seen), "distinct": len(set(seen)), "sum": sum(seen)}


class Summing(pytorch.PyTorchCallback):
    """Adds up the samples of its rank."""

    def __init__(self) -> None:
        self.sum = 0

    def state_dict(self) -> dict[str, Any]:
        sums = np.zeros(2001)
        sums[1000] = self.sum  # where the repr of an array has dots
        return {"sums": sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sum = state_dict["sums"][1000]


class Stream(torch.utils.data.IterableDataset):
    """The samples in order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(SAMPLES, dtype=torch.float32)[:, None]


def train(
    run_dir: Path,
    steps: int,
    resume: str | None = None,
    *,
    micro: int | None = None,
    stage: int = 1,
    data: str = "indexed",
) -> dict[str, Any]:
    """Train in this rank on data that is indexed, a stream, or a shard of one; report and save every two batches.

    Returns the sum of its callback, what it drew in each step, and what was raised.
    """
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, DeterminedDSError, Trainer, open_context

    numbers = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
    summing, drawn = Summing(), []

    class Counted(DataParallelTrial):
        def prepare(self) -> None:
            self.seen = self.context.wrap_reducer(Seen(), for_validation=False)

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def loss(self, model: Any, batch: Any) -> Any:
            inputs = batch if isinstance(batch, torch.Tensor) else batch[0]
            if model.module.training:
                samples = [int(number) for number in inputs.flatten()]
                self.seen.samples += samples
                summing.sum += sum(samples)
                drawn.append(float(torch.rand(())))
            return (model(inputs) ** 2).mean() + inputs.mean()

        def build_callbacks(self) -> Any:
            return {"summing": summing}

        def build_training_data_loader(self) -> Any:
            if data != "indexed":
                return self.training_loader(Stream(), sharded=data == "shard")
            return self.training_loader(torch.utils.data.TensorDataset(numbers))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(torch.utils.data.TensorDataset(numbers[:8]))

    ds_config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    hparams = {
        "global_batch_size": GLOBAL,
        "deepspeed_config": ds_config,
        "micro_batch_size": micro or "auto",
    }
    error = ""
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        try:
            Trainer(Counted(context), context).fit(
                max_length=Batch(steps),
                checkpoint_period=Batch(2),
                reporting_period=Batch(2),
                checkpoint_policy="none",
                latest_checkpoint=resume,
            )
        except DeterminedDSError as raised:
            error = str(raised)
    return {"sum": summing.sum, "drawn": drawn, "error": error}


def at(run_dir: Path, batch: int) -> str:
    """The newest checkpoint of a batch."""
    written = f'"steps_completed": {batch},'
    return next(path.name for path in checkpoints(run_dir) if written in (path / "metadata.json").read_text())


LONG = pytest.mark.long("2-4-1 has more ranks and fewer")


@pytest.mark.parametrize(
    ("sizes", "micro", "data"),
    [
        pytest.param((2, 4, 1), 1, "indexed", id="2-4-1"),
        pytest.param((2, 1, 2), 2, "stream", id="2-1-2 on a stream", marks=LONG),
        pytest.param((4, 2, 4), None, "indexed", id="4-2-4", marks=LONG),
    ],
)
def test_reports_are_those_of_all_samples_whichever_ranks_saw_them(
    sizes: tuple[int, ...],
    micro: int | None,
    data: str,
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
    tmp_path: Path,
) -> None:
    """Resumed from the checkpoints at two and four batches by other ranks under another stage."""
    ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}
    two_ranks.run(train, tmp_path / "whole", 6, data=data)
    ranks[sizes[0]].run(train, tmp_path / "run", 3, data=data)
    how: dict[str, Any] = {"micro": micro, "data": data}
    ranks[sizes[1]].run(train, tmp_path / "run", 5, at(tmp_path / "run", 2), stage=2, **how)
    ranks[sizes[2]].run(train, tmp_path / "run", 6, at(tmp_path / "run", 4), **how)
    found, expected = (dict(records(tmp_path / name, "training")) for name in ("run", "whole"))
    assert expected.keys() == {2, 4, 6}
    for batch, report in expected.items():
        assert report["count"] == 2 * GLOBAL
        for name in ("count", "distinct", "sum", "loss"):
            assert found[batch][name] == pytest.approx(report[name], rel=1e-5), (batch, name)


def test_of_a_callbacks_states_one_is_kept_and_it_is_said(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    first, _ = two_ranks.run(train, tmp_path / "run", 4)
    before = len(one_rank.said(0))
    [found] = one_rank.run(train, tmp_path / "run", 4, at(tmp_path / "run", 4))
    assert found["sum"] == first["sum"]
    assert (
        "callbacks go on with the state of the rank that held the same replica" in one_rank.said(0)[before:]
    )


def test_a_stream_of_each_replica_is_refused_by_another_number_of_them(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Its position is that of its own samples."""
    two_ranks.run(train, tmp_path / "run", 2, data="shard")
    [found] = one_rank.run(train, tmp_path / "run", 4, at(tmp_path / "run", 2), data="shard")
    assert "Stream gives each replica its own samples" in found["error"]
    assert "fix: " in found["error"]
    again = two_ranks.run(train, tmp_path / "run", 4, at(tmp_path / "run", 2), data="shard")
    assert [each["error"] for each in again] == ["", ""]


def test_the_first_replica_draws_on_and_a_second_one_draws_its_own(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    whole = two_ranks.run(train, tmp_path / "whole", 6)
    two_ranks.run(train, tmp_path / "run", 4)
    [alone] = one_rank.run(train, tmp_path / "run", 4, at(tmp_path / "run", 2))
    assert alone["drawn"][:2] == whole[0]["drawn"][2:4]
    uuid = at(tmp_path / "run", 4)
    first, second = two_ranks.run(train, tmp_path / "run", 6, uuid)
    again = two_ranks.run(train, tmp_path / "run", 6, uuid)
    assert set(first["drawn"]).isdisjoint(second["drawn"])
    assert [each["drawn"] for each in again] == [first["drawn"], second["drawn"]]
