"""What a checkpoint holds of each rank, read by real ranks in another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch

from tests.ranks import Ranks

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


class Counting(pytorch.PyTorchCallback):
    """Counts the samples of its rank, and joins the counts of all."""

    def __init__(self) -> None:
        self.count, self.reports = 0, []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def load_whole(self, states: Any) -> None:
        self.count = sum(state["count"] for state in states)

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.reports.append({name: avg_metrics[name] for name in ("loss", "count", "distinct", "sum")})


def train(
    run_dir: Path, steps: int, resume: str | None = None, micro: int | None = None, stage: int = 1
) -> Any:
    """Train in this rank, with one report at batch 6. Returns it, the count, the checkpoints, what was drawn."""
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    numbers = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
    counting, drawn = Counting(), []

    class Counted(DataParallelTrial):
        def prepare(self) -> None:
            self.seen = self.context.wrap_reducer(Seen(), for_validation=False)

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def loss(self, model: Any, batch: Any) -> Any:
            if model.module.training:
                self.seen.samples += [int(number) for number in batch[0].flatten()]
                counting.count += len(batch[0])
                drawn.append(float(torch.rand(())))
            return (model(batch[0]) ** 2).mean() + batch[0].mean()

        def build_callbacks(self) -> Any:
            return {"counting": counting}

        def build_training_data_loader(self) -> Any:
            return self.training_loader(torch.utils.data.TensorDataset(numbers))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(torch.utils.data.TensorDataset(numbers[:8]))

    ds_config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    hparams: dict[str, Any] = {"global_batch_size": GLOBAL, "deepspeed_config": ds_config}
    if micro is not None:
        hparams["micro_batch_size"] = micro
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        Trainer(Counted(context), context).fit(
            max_length=Batch(steps),
            checkpoint_period=Batch(2),
            reporting_period=Batch(6),
            checkpoint_policy="none",
            latest_checkpoint=resume,
        )
    return {"reports": counting.reports, "count": counting.count, "drawn": drawn}


def at(run_dir: Path, batch: int) -> str:
    """The checkpoint of a batch."""
    from determined_ds.protocol.checkpoint_files import checkpoints_in

    return next(
        each.uuid for each in checkpoints_in(run_dir / "checkpoints") if each.steps_completed == batch
    )


LONG = pytest.mark.long("2-4-1 has more ranks and fewer")


@pytest.mark.parametrize(
    ("sizes", "micro"),
    [
        pytest.param((2, 4, 1), 1, id="2-4-1"),
        pytest.param((2, 1), None, id="2-1", marks=LONG),
        pytest.param((1, 2, 1), 2, id="1-2-1", marks=LONG),
        pytest.param((4, 2, 4), None, id="4-2-4", marks=LONG),
    ],
)
def test_a_report_is_that_of_all_samples_whichever_ranks_saw_them(
    sizes: tuple[int, ...],
    micro: int | None,
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
    tmp_path: Path,
) -> None:
    """Over six batches, resumed from the checkpoints at two and four by other ranks under another stage."""
    ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}
    whole, *_ = two_ranks.run(train, tmp_path / "whole", 6)
    ranks[sizes[0]].run(train, tmp_path / "run", 3)
    for number, size in enumerate(sizes[1:]):
        start, last = 2 * (number + 1), number == len(sizes) - 2
        uuid = at(tmp_path / "run", start)
        found = ranks[size].run(train, tmp_path / "run", 6 if last else start + 3, uuid, micro, 2 - number)
    [report], [expected] = found[0]["reports"], whole["reports"]
    assert (report["count"], report["distinct"], report["sum"]) == (48, SAMPLES, 2 * sum(range(SAMPLES)))
    assert report == pytest.approx(expected, rel=1e-5)


def test_a_callback_is_given_the_states_of_all_ranks(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(train, tmp_path / "run", 4)
    [found] = one_rank.run(train, tmp_path / "run", 6, at(tmp_path / "run", 4))
    assert found["count"] == 6 * GLOBAL


def test_the_first_replica_draws_on_and_a_second_one_draws_its_own(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    whole = two_ranks.run(train, tmp_path / "whole", 6)
    two_ranks.run(train, tmp_path / "run", 4)
    uuid = at(tmp_path / "run", 2)
    [alone] = one_rank.run(train, tmp_path / "run", 4, uuid)
    assert alone["drawn"][:2] == whole[0]["drawn"][2:4]
    uuid = at(tmp_path / "run", 4)
    first, second = two_ranks.run(train, tmp_path / "run", 6, uuid)
    again = two_ranks.run(train, tmp_path / "run", 6, uuid)
    assert set(first["drawn"]).isdisjoint(second["drawn"])
    assert [each["drawn"] for each in again] == [first["drawn"], second["drawn"]]
