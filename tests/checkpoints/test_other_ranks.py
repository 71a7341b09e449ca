"""What a checkpoint holds of each rank, read by another number of ranks: nothing is lost, and nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksOf
from tests.package import checkpoints, records
from tests.train.small import fit, hyperparameters, linear_trial

GLOBAL = 8
SAMPLES = 24  # three batches an epoch


def counted(samples: list[int]) -> dict[str, int]:
    """Of the samples of all ranks since the last report."""
    return {"count": len(samples), "distinct": len(set(samples)), "sum": sum(samples)}


class Stream(torch.utils.data.IterableDataset):
    """The samples in order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(SAMPLES, dtype=torch.float32)[:, None]


def train(
    run_dir: Path, steps: int, resume: Path | str | None = None, *, stage: int = 1, data: str = "indexed"
) -> list[float]:
    """In a rank: report and save every two batches. Returns what it drew in each step."""
    drawn: list[float] = []

    class Counted(linear_trial()):  # type: ignore[misc]
        def prepare(self) -> None:
            self.data = torch.utils.data.TensorDataset(torch.arange(float(SAMPLES))[:, None])
            self.seen = self.context.wrap_reducer(counted, for_validation=False)

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def loss(self, model: Any, batch: Any) -> Any:
            inputs = batch if isinstance(batch, torch.Tensor) else batch[0]
            if model.module.training:
                for number in inputs.flatten():
                    self.seen.update(int(number))
                drawn.append(float(torch.rand(())))
            return (model(inputs) ** 2).mean() + inputs.mean()

        def build_training_data_loader(self) -> Any:
            if data != "indexed":
                return self.training_loader(Stream(), sharded=data == "shard")
            return super().build_training_data_loader()

    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    hparams = hyperparameters(stage, optimizer=optimizer)
    periods: dict[str, Any] = dict.fromkeys(("checkpoint_period", "reporting_period"), ("batches", 2))
    how = {**periods, "checkpoint_policy": "none", "latest_checkpoint": resume and str(resume)}
    fit(run_dir, Counted, hparams=hparams, max_length=("batches", steps), **how)
    return drawn


def at(run_dir: Path, batch: int) -> Path:
    """The newest checkpoint of a batch."""
    written = f'"steps_completed": {batch},'
    return next(path for path in checkpoints(run_dir) if written in (path / "metadata.json").read_text())


@pytest.mark.parametrize(
    "data", ["indexed", pytest.param("stream", marks=pytest.mark.long("the same of data that is indexed"))]
)
def test_reports_are_those_of_all_samples_whichever_ranks_saw_them(
    data: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    """Resumed from the checkpoints at two and four batches by more and by fewer ranks under another stage."""
    run_dir = tmp_path / "run"
    ranks_of(2).run(train, tmp_path / "whole", 6, data=data)
    ranks_of(2).run(train, run_dir, 3, data=data)
    ranks_of(4).run(train, run_dir, 5, at(run_dir, 2).name, stage=2, data=data)
    ranks_of(1).run(train, run_dir, 6, at(run_dir, 4).name, data=data)
    found, expected = (dict(records(tmp_path / name, "training")) for name in ("run", "whole"))
    assert expected.keys() == {2, 4, 6}
    for batch, report in expected.items():
        assert report["count"] == 2 * GLOBAL
        for name in ("count", "distinct", "sum", "loss"):
            assert found[batch][name] == pytest.approx(report[name], rel=1e-5), (batch, name)


def test_a_stream_of_each_replica_is_refused_by_another_number_of_them(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Its position is that of its own samples."""
    two_ranks.run(train, tmp_path / "run", 2, data="shard")
    with pytest.raises(AssertionError, match=r"Stream gives each replica its own samples[^$]*fix: "):
        one_rank.run(train, tmp_path / "other", 4, at(tmp_path / "run", 2), data="shard")
    two_ranks.run(train, tmp_path / "same", 4, at(tmp_path / "run", 2), data="shard")


def test_a_replica_draws_on_and_a_new_one_draws_its_own(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """What a second one draws is the same each time."""
    drawn, _ = two_ranks.run(train, tmp_path / "whole", 6)
    [alone] = one_rank.run(train, tmp_path / "alone", 4, at(tmp_path / "whole", 2))
    assert alone[:2] == drawn[2:4]
    first, again = (two_ranks.run(train, tmp_path / name, 6, at(tmp_path / "alone", 4)) for name in "ab")
    assert first == again
    assert set(first[0]).isdisjoint(first[1])
