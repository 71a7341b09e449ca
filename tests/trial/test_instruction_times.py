"""A pipeline's bubble is what its stages wait, by the times of their own instructions.

The stages are made as slow as a test wants them: a layer sleeps on its way forward and back. A CPU that is shared
makes sleeping longer, which is work like any other, and the rest a little longer, which is waiting; a batch in
which a stage is put off is one of several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

MICRO_BATCHES = 4
BATCHES = 9
STAGES = 2
IDEAL = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
DATA = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.ones(3)) for i in range(16)]


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(torch.nn.Linear):
    """A layer that takes ``seconds`` forward, and as many backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__(3, 3)
        torch.nn.init.eye_(self.weight)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(super().forward(inputs), self.seconds)


def hyperparameters(stages: int) -> dict[str, Any]:
    return {
        "global_batch_size": 2 * MICRO_BATCHES,
        "pipe_parallel_size": stages,
        "learning_rate": 0.1,
        "deepspeed_config": {"optimizer": {"type": "AdamW"}},
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES // (STAGES // stages)},
    }


def train(run_dir: Path, seconds: tuple[float, ...]) -> None:
    """In a rank: a pipeline whose stages take so many seconds each; replicas, where there is but one."""
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, Trainer, open_context

    class Loaders:
        def build_training_data_loader(self: Any) -> Any:
            return self.training_loader(DATA, shuffle=False)

        def build_validation_data_loader(self: Any) -> Any:
            return self.validation_loader(DATA)

        def loss(self: Any, first: Any, second: Any) -> torch.Tensor:
            outputs, targets = (first, second) if len(seconds) > 1 else (first(second[0]), second[1])
            return torch.nn.functional.mse_loss(outputs, targets)

    class Piped(Loaders, PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            return [Slow(own) for own in seconds]

    class Replicated(Loaders, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return Slow(seconds[0])

    hparams = hyperparameters(len(seconds))
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = (Piped if len(seconds) > 1 else Replicated)(context)
        Trainer(trial, context).fit(
            max_length=Batch(BATCHES),
            reporting_period=Batch(1),
            validation_period=Batch(BATCHES),
            checkpoint_policy="none",
        )


Reports = Callable[[Path, str], list[dict[str, Any]]]


def bubble_of(ranks: Ranks, run_dir: Path, metrics_of: Reports, *seconds: float) -> float:
    """The median of batches but for the first one, in which the stages tell each other their shapes."""
    ranks.run(train, run_dir, seconds)
    reports = metrics_of(run_dir, "training")[1:]
    assert len(reports) == BATCHES - 1
    assert all(report["bubble_ideal"] == pytest.approx(IDEAL) for report in reports)
    return statistics.median(float(report["bubble"]) for report in reports)


def test_equal_stages_wait_as_little_as_they_can(
    two_ranks: Ranks, tmp_path: Path, metrics_of: Reports
) -> None:
    assert IDEAL - 0.03 < bubble_of(two_ranks, tmp_path, metrics_of, 0.01, 0.01) < IDEAL + 0.2


def test_a_quick_stage_waits_for_a_slow_one(two_ranks: Ranks, tmp_path: Path, metrics_of: Reports) -> None:
    """The first one's forward, the second one's four forwards and backwards, the first one's backward."""
    quick, slow = 0.002, 0.016
    busy = MICRO_BATCHES * 2 * (quick + slow) / 2
    span = quick + MICRO_BATCHES * 2 * slow + quick
    assert bubble_of(two_ranks, tmp_path, metrics_of, quick, slow) == pytest.approx(1 - busy / span, abs=0.08)


def test_a_slow_stage_does_not_wait_for_a_quick_one(
    two_ranks: Ranks, tmp_path: Path, metrics_of: Reports
) -> None:
    """The other way round: the first stage has always something to do, the second next to nothing."""
    quick, slow = 0.002, 0.016
    assert bubble_of(two_ranks, tmp_path, metrics_of, slow, quick) == pytest.approx(
        1 - (slow + quick) / 2 / slow, abs=0.08
    )


def test_replicas_have_no_bubble(two_ranks: Ranks, tmp_path: Path, metrics_of: Reports) -> None:
    two_ranks.run(train, tmp_path, (0.0,))
    assert not any("bubble" in name for report in metrics_of(tmp_path, "training") for name in report)


def by_hand(timed: bool) -> dict[str, Any]:
    """In a rank: a pipeline of DeepSpeed's own, with nothing of ours but, maybe, the times."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.trial.instruction_times import instruction_times, time_instructions

    join_process_group(detect_accelerator("cpu"))
    torch.manual_seed(1)
    layers = [torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    module = PipelineModule(layers, num_stages=STAGES, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_batch_size": 2 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    if timed:
        time_instructions(engine)
        time_instructions(engine)  # once is enough
    loader = torch.utils.data.DataLoader(DATA, batch_size=2)
    losses = [float(engine.train_batch(iter(loader))) for _ in range(4)]
    times = instruction_times(engine)
    training = times.take() if times else ()
    losses.append(float(engine.eval_batch(iter(loader))))
    evaluation = times.take() if times else ()
    losses.append(float(engine.train_batch(iter(loader))))
    return {"losses": losses, "training": training, "evaluation": evaluation}


def test_losses_are_the_same_to_the_last_bit(two_ranks: Ranks) -> None:
    plain, timed = (two_ranks.run(by_hand, on) for on in (False, True))
    assert plain[0]["training"] == ()
    assert [found["losses"] for found in timed] == [found["losses"] for found in plain]


def test_evaluation_is_not_timed(two_ranks: Ranks) -> None:
    for found in two_ranks.run(by_hand, True):
        busy, span = found["training"]
        assert 0 < busy < span
        assert found["evaluation"] == (0.0, 0.0)


def bubbles(*cases: tuple[list[float], list[float], list[list[int]]]) -> list[float | None]:
    """In a rank, since DeepSpeed is loaded with it."""
    from determined_ds.trial.instruction_times import bubble

    return [bubble(*case) for case in cases]


def test_replicas_of_a_pipeline_have_one_each(one_rank: Ranks) -> None:
    busy, span = [6.0, 4.0, 2.0, 2.0], [10.0, 8.0, 4.0, 5.0]
    (found,) = one_rank.run(
        bubbles,
        (busy, span, [[0, 1], [2, 3]]),
        (busy, span, [[0, 2], [1, 3]]),
        (busy, [0.0] * 4, [[0, 1], [2, 3]]),
    )
    assert found == [
        pytest.approx(((1 - 5 / 10) + (1 - 2 / 5)) / 2),
        pytest.approx(((1 - 4 / 10) + (1 - 3 / 8)) / 2),
        None,
    ]
