"""A measured pipeline's step is recorded: each pass of its schedule once, in its order, after what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.pipe.orders import INPUT, ONE_F_ONE_B
from determined_ds.pipe.recording import LOAD, RecordedStep
from determined_ds.pipe.timeline import awaited
from tests.ranks import Ranks

MICRO_BATCHES = 4
STEPS = 5


def measured(run_dir: Path, schedule: str, parts: int) -> Any:
    """In a rank: the row of a pipeline of two ranks."""
    from determined_ds import PipelineTrial, measure_throughput, open_context

    class Piped(PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            return [torch.nn.Linear(3, 3) for _ in range(4)]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

        def build_training_data_loader(self: Any) -> Any:
            return self.training_loader([(torch.ones(3), torch.ones(3))] * 16)

        def build_validation_data_loader(self: Any) -> Any:
            return self.validation_loader([(torch.ones(3), torch.ones(3))] * 16)

    hparams = {
        "global_batch_size": MICRO_BATCHES,
        "pipe_parallel_size": 2,
        "pipe_schedule": schedule,
        "learning_rate": 0.1,
        "deepspeed_config": {"optimizer": {"type": "AdamW"}},
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES},
    }
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        return measure_throughput(Piped(context), context, steps=STEPS, warmup=1, parts=parts)


@pytest.mark.parametrize(("schedule", "parts"), [(ONE_F_ONE_B, 1), ("zb-h1", 0), ("dualpipev", 0)])
def test_each_pass_once_in_order_after_what_it_waits_for(
    two_ranks: Ranks, tmp_path: Path, schedule: str, parts: int
) -> None:
    """And every rank returns the same step."""
    first, second = two_ranks.run(measured, tmp_path, schedule, parts)
    [repetition] = first.repetitions
    step: RecordedStep = repetition.pipeline_step
    assert step == second.repetitions[0].pipeline_step
    assert (step.schedule, step.ranks, step.micro_batches) == (schedule, 2, MICRO_BATCHES)
    assert (step.chunks, step.machines) == (2 if schedule == "dualpipev" else 1, 1)

    passes = [[span for span in own if span.op.kind != LOAD] for own in step.spans]
    assert [[span.op for span in own] for own in passes] == step.pipeline.orders()
    ends = {span.op: span.end for own in passes for span in own}
    ends |= {op._replace(kind="B"): end for op, end in ends.items() if op.kind == INPUT}
    for span in (span for own in passes for span in own):
        assert span.start < span.end
        assert all(ends[op] <= span.start for op in awaited(span.op, step.pipeline.parts))
    assert min(own[0].start for own in step.spans) == 0
    assert step.seconds <= max(repetition.step_seconds)
    assert 0 < step.bubble < 1
