"""What ranks of a pipeline wait under every schedule, counted and measured, and what a step takes beside its plan.

Layers sleep in place of computing, so that more ranks than cores compute at once: a forward pass for a time that is
known, a backward pass as long for its inputs, and as long again for its weights.

python -c "from tests.benchmarks.schedules import table; print(table(2))"
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from determined_ds.pipe.orders import DUALPIPEV, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1, Pipeline
from determined_ds.pipe.timeline import counted_bubble, timeline
from tests.ranks import Ranks, compile_nothing

PASS_S = 0.1  # of a micro-batch through all layers of a rank, forward
MICRO_BATCHES = 4  # of a step, a rank
TURNS = 5
SCHEDULES = ((ONE_F_ONE_B, 1), (GPIPE, 1), (INTERLEAVED, 2), (ZB_H1, 1), (DUALPIPEV, 2))


def pipeline(schedule: str, chunks: int, ranks: int) -> Pipeline:
    return Pipeline(schedule=schedule, ranks=ranks, micro_batches=MICRO_BATCHES * ranks, chunks=chunks)


def layers(pipe: Pipeline, pass_s: float) -> list[Any]:
    """As many as parts, of one length."""
    import torch

    class Slept(torch.autograd.Function):
        """The identity; on the way of a gradient it takes its time."""

        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            time.sleep(pass_s / pipe.chunks)
            return gradients[0]

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.first = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(pass_s / pipe.chunks)
            # The first inputs have no gradient: with something added, they take as long as any other.
            return Slept.apply(inputs + self.first) + Slept.apply(self.bias)

    return [Timed() for _ in range(pipe.parts)]


def measure(ranks: int, pass_s: float) -> list[list[tuple[float, float, float]]]:
    """In a rank: of each schedule the seconds of work, of waiting and work, and of the step, a turn."""
    import torch

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.trial.instruction_times import instruction_times, time_instructions
    from determined_ds.trial.ordered_engine import initialize
    from determined_ds.trial.ordered_module import made_module

    join_process_group(detect_accelerator("cpu"))
    engines = []
    for schedule, chunks in SCHEDULES:
        pipe = pipeline(schedule, chunks, ranks)
        module = made_module(
            pipe,
            num_stages=ranks,
            layers=layers(pipe, pass_s),
            loss_fn=torch.nn.functional.mse_loss,
            partition_method="uniform",
        )
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": pipe.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        }
        engine = initialize(model=module, model_parameters=list(module.parameters()), config=config)
        time_instructions(engine)
        engines.append(engine)
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    found: list[list[tuple[float, float, float]]] = [[] for _ in engines]
    for turn in range(TURNS + 1):
        for engine, own in zip(engines, found, strict=True):
            torch.distributed.barrier()
            start = time.perf_counter()
            engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))
            seconds = time.perf_counter() - start
            times = instruction_times(engine)
            assert times is not None
            if turn:  # in the first one stages tell each other their shapes
                own.append((*times.take(), seconds))
            else:
                times.take()
    return found


def table(ranks: int, pass_s: float = PASS_S) -> str:
    """Measure, and return the table."""
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = Ranks(ranks, Path(folder) / "logs", first=compile_nothing).run(measure, ranks, pass_s)
    rows = [
        f"| {ranks} ranks, {MICRO_BATCHES * ranks} micro-batches | counted | measured | measured / counted"
        " | step, s | step / planned | step / 1F1B's | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first: tuple[float, float] | None = None
    for index, (schedule, chunks) in enumerate(SCHEDULES):
        pipe = pipeline(schedule, chunks, ranks)
        turns = list(zip(*(each[index] for each in of_ranks), strict=True))  # of all ranks, a turn
        bubble = statistics.median(
            1 - sum(busy for busy, *_ in turn) / ranks / max(span for _, span, _ in turn) for turn in turns
        )
        step_s = statistics.median(max(seconds for *_, seconds in turn) for turn in turns)
        counted = counted_bubble(pipe)
        planned_s = max(own[-1].end for own in timeline(pipe)) * pass_s / chunks
        first = first or (step_s, planned_s)
        rows.append(
            f"| {schedule}{f', {chunks} chunks' if chunks > 1 else ''} | {counted:.1%} | {bubble:.1%}"
            f" | {bubble / counted:.2f} | {step_s:.3f} | {step_s / planned_s:.3f} | {step_s / first[0]:.3f}"
            f" | {planned_s / first[1]:.3f} |"
        )
    return "\n".join(rows)
