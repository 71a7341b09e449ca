"""Results that the tests of this room are about: written out, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.partition import LayerTime
from determined_ds.pipe.recording import RecordedStep, recorded_step
from determined_ds.pipe.timeline import Span, timeline
from determined_ds.protocol.layer_shares import Partition
from determined_ds.report.repetition import Repetition
from determined_ds.report.results import (
    ACCELERATORS,
    CANNOT_RUN,
    MEASURED,
    OUT_OF_MEMORY,
    PRECISIONS,
    STATUSES,
    Results,
    Row,
)

MIB = 2**20


def repetition(steps: Sequence[float] = (0.2, 0.1, 0.3), **others: Any) -> Repetition:
    """One start: two steps of warm-up, and a loss that falls by 0.1 a step to 3.0."""
    num = 2 + len(steps)
    fields: dict[str, Any] = {
        "run_dir": "runs/zero1-x2/1",
        "step_seconds": tuple(steps),
        "losses": tuple(3.0 + 0.1 * (num - 1 - step) for step in range(num)),
        "warmup": 2,
        "start_seconds": 6.5,
        "peak_memory_bytes_by_rank": (690 * MIB, 700 * MIB),
        "model_state_bytes_by_rank": (12 * MIB, 11 * MIB),
    }
    return Repetition(**{**fields, **others})


def row(name: str = "zero1", *repetitions: Repetition, **others: Any) -> Row:
    """A row that was measured: 32 samples of 128 tokens a step, on two replicas unless told otherwise."""
    fields: dict[str, Any] = {
        "slots": 2,
        "status": MEASURED,
        "zero_stage": 1,
        "micro_batch_size": 16,
        "accumulation": 1,
        "replicas": 2,
        "pipe_parallel_size": 1,
        "precision": "fp32",
        "samples_per_step": 32,
        "tokens_per_sample": 128,
        "estimated_model_state_bytes": 11 * MIB,
        "repetitions": repetitions or (repetition(),),
    }
    return Row(name=name, **{**fields, **others})


PARTS = {"data": 0.01, "forward": 0.09, "backward": 0.2, "communication": 0.08, "optimizer": 0.02}


def failed(name: str, status: str = OUT_OF_MEMORY, reason: str = "it asked for 2 GiB", **others: Any) -> Row:
    """A row that was not measured."""
    return Row(name=name, status=status, reason=reason, **{"slots": 2, **others})


def results(*rows: Row, **others: Any) -> Results:
    """Rows as results, on a CPU."""
    fields: dict[str, Any] = {
        "title": "gpt2_const",
        "command": "det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1",
        "created": "2026-11-20T18:40:00",
        "machine": "x86_64, 2 CPU cores",
        "accelerator": "cpu",
        "steps": 3,
    }
    return Results(rows=rows, **{**fields, **others})


def recorded(pipe: Pipeline, *, late: float = 0.001) -> RecordedStep:
    """A step whose unit takes 10 ms, and whose passes each start a little late."""
    spans = [
        [Span(op=span.op, start=span.start / 100 + late, end=span.end / 100) for span in rank]
        for rank in timeline(pipe)
    ]
    found = recorded_step(pipe, spans, ["here"] * pipe.ranks)
    assert found is not None
    return found


OF_TWO = Pipeline(schedule="1f1b", ranks=2, micro_batches=8)


def comparison() -> Results:
    """Five rows: two strategies on one and two slots, a pipeline with its bubble; one more ran out of memory, and
    one cannot run."""
    one, two = {"slots": 1, "replicas": 1, "micro_batch_size": 32}, {"slots": 2}
    pipe = {"replicas": 1, "pipe_parallel_size": 2, "micro_batch_size": 4, "accumulation": 8, "zero_stage": 0}
    small = {"peak_memory_bytes_by_rank": (511 * MIB, 500 * MIB), "bubble": 0.141, "bubble_ideal": 1 / 9}
    return results(
        row("zero0", repetition([0.40, 0.41]), repetition([0.42, 0.43]), **one),
        row("zero1", repetition([0.44, 0.44]), repetition([0.45, 0.45]), **one),
        failed("zero3", slots=1),
        row("zero0", repetition([0.21, 0.22]), repetition([0.22, 0.22]), **two),
        row("zero1", repetition([0.24, 0.24]), repetition([0.25, 0.26]), **two),
        row(
            "pipeline",
            repetition([0.28, 0.28], pipeline_step=recorded(OF_TWO), **small),
            repetition([0.29, 0.29], **small),
            **{**two, **pipe},
        ),
        failed("pipeline", CANNOT_RUN, "2 stages need 2 slots or more", slots=1, pipe_parallel_size=2),
    )


# --------------------------------------------------------------------------------------------- hypothesis

few = settings(max_examples=25)  # results are large

seconds = st.floats(1e-6, 1e4)
losses = st.floats(allow_nan=True, allow_infinity=True)
sizes = st.integers(0, 2**45)
counts = st.integers(1, 2**20)
shares = st.floats(0, 1)


def repetitions(loss: st.SearchStrategy[float] = losses) -> st.SearchStrategy[Repetition]:
    return st.builds(
        Repetition,
        run_dir=st.text(max_size=8),
        step_seconds=st.lists(seconds, max_size=6).map(tuple),
        losses=st.lists(loss, max_size=9).map(tuple),
        warmup=st.integers(0, 5),
        start_seconds=st.floats(0, 1e4),
        peak_memory_bytes_by_rank=st.lists(sizes, max_size=3).map(tuple),
        model_state_bytes_by_rank=st.lists(sizes, max_size=3).map(tuple),
        bubble=st.none() | shares,
        bubble_ideal=st.none() | shares,
        pipeline_step=st.sampled_from([None, recorded(OF_TWO)]),
    )


def rows(
    loss: st.SearchStrategy[float] = losses, names: st.SearchStrategy[str] | None = None
) -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        name=st.text(max_size=30) if names is None else names,
        slots=counts,
        status=st.sampled_from(STATUSES),
        reason=st.text(max_size=60),
        zero_stage=st.none() | st.integers(0, 3),
        micro_batch_size=st.none() | counts,
        accumulation=st.none() | counts,
        replicas=st.none() | counts,
        pipe_parallel_size=st.none() | counts,
        precision=st.none() | st.sampled_from(PRECISIONS),
        samples_per_step=st.none() | counts,
        tokens_per_sample=st.none() | counts,
        estimated_model_state_bytes=st.none() | sizes,
        repetitions=st.lists(repetitions(loss), max_size=3).map(tuple),
    )


def any_results(
    loss: st.SearchStrategy[float] = losses, names: st.SearchStrategy[str] | None = None
) -> st.SearchStrategy[Results]:
    return st.builds(
        Results,
        title=st.text(max_size=20),
        command=st.text(max_size=20),
        created=st.text(max_size=20),
        machine=st.text(max_size=20),
        accelerator=st.sampled_from(ACCELERATORS),
        steps=st.integers(0, 1000),
        rows=st.lists(rows(loss, names), max_size=5).map(tuple),
    )


def layer(name: str, seconds: float) -> LayerTime:
    """A layer of a pipeline, its backward pass twice as long as its forward pass."""
    return LayerTime(name=name, parameters=10, forward_s=seconds / 3, backward_s=2 * seconds / 3)


SHARED_OUT = Partition(
    pipe=Pipeline(schedule="1f1b", ranks=2, micro_batches=8),
    layers=(layer("Embedding", 0.002), *[layer("Block", 0.01)] * 4, layer("Head", 0.03)),
    bounds=(0, 4, 6),
    by_parameters=(0, 3, 6),
)
