"""Steps of transformers by size and micro-batch, and the peak of the device that they are held against."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from determined_ds.memory.model import ModelShape
from determined_ds.protocol.machine_figures import Peak, TimedStep
from determined_ds.runtime.benching.bench_engine import engine_of, strategy_named
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.enough_memory import too_large
from determined_ds.runtime.benching.latency import quartiles
from determined_ds.runtime.benching.model_sizes import shape_named, step_flops
from determined_ds.runtime.benching.timing import Group
from determined_ds.runtime.profiling.peak_flops import peak_flops_by_precision

PEAK_S = 0.5  # for each precision
WARMUP = 2
FEWEST, MOST = 5, 40  # steps that are timed


def measure_training(group: Group, request: BenchRequest) -> tuple[tuple[TimedStep, ...], tuple[Peak, ...]]:
    """Time steps of each model at each micro-batch under one strategy.

    Args:
        group: Any number of ranks.
        request: Models, micro-batches, precision; of the strategies the first.
    """
    peaks = _peaks(group)
    found: list[TimedStep] = []
    for index, model in enumerate(request.models):
        budget_s = group.left_s() / (len(request.models) - index)
        shape = shape_named(model, group.device.type)
        found += _of_model(group, request, model, shape, budget_s, _rate(found))
        timed = [each for each in found if each.model == model]
        if timed:
            best = max(each.samples_per_s for each in timed)
            group.say(
                f"{model}: {best:,.1f} samples/s at micro-batches of {[t.micro_batch_size for t in timed]}"
            )
    return tuple(found), peaks


def _peaks(group: Group) -> tuple[Peak, ...]:
    """The slowest rank's, while all compute."""
    group.timed(lambda: None)
    own = peak_flops_by_precision(group.device, seconds=PEAK_S)
    slowest = group.slowest([-each for each in own.values()])
    threads = torch.get_num_threads() if group.device.type == "cpu" else 0
    ranks = int(group.distributed.local_size)
    peaks = tuple(
        Peak(precision=precision, ranks=ranks, threads=threads, flops_per_s=-least)
        for precision, least in zip(own, slowest, strict=True)
    )
    shown = ", ".join(f"{each.precision} {each.flops_per_s / 1e9:,.0f}" for each in peaks)
    group.say(f"peak of a rank in GFLOP/s: {shown}")
    return peaks


def _of_model(
    group: Group, request: BenchRequest, model: str, shape: ModelShape, budget_s: float, rate: float | None
) -> list[TimedStep]:
    name, ranks = request.strategies[0], group.distributed.size
    strategy = strategy_named(name, shape, precision=request.precision, replicas=ranks)
    end_s = group.left_s() - budget_s
    fitting = []
    for samples in request.micro_batches:
        if reason := too_large(group, shape, replace(strategy, micro_batch_size=samples)):
            group.notes.append(f"{model} at {samples} samples: {reason}")
        else:
            fitting.append(samples)
    if not fitting:
        return []
    found: list[TimedStep] = []
    with engine_of(shape, strategy, group.device) as engine:
        for index, samples in enumerate(fitting):
            left_s = group.left_s() - end_s
            rate = _rate(found) or rate
            if rate and (FEWEST + WARMUP) * samples * step_flops(shape) / rate > left_s:
                group.notes.append(f"{model}: no time was left for {samples} samples and more")
                break
            seconds = _steps(group, engine, samples, end_s + left_s * (1 - 1 / (len(fitting) - index + 1)))
            low, median, high = quartiles(seconds)
            found.append(
                TimedStep(
                    model=model,
                    num_parameters=shape.num_parameters,
                    strategy=name,
                    precision=request.precision,
                    ranks=ranks,
                    micro_batch_size=samples,
                    samples=samples * ranks,
                    tokens_per_sample=shape.sequence_length,
                    step_seconds=median,
                    fast_step_seconds=low,
                    slow_step_seconds=high,
                    flops=samples * ranks * step_flops(shape),
                )
            )
    return found


def _rate(found: list[TimedStep]) -> float | None:
    """What a rank reached, in operations a second, for a guess of what is to come; None where nothing is known."""
    return found[-1].flops_per_s if found else None


def _steps(group: Group, engine: Any, samples: int, until_left_s: float) -> list[float]:
    """Seconds of steps, the slowest rank's, until so much time is left."""
    tokens = engine.module.random_tokens(samples)
    own: list[float] = []
    while len(own) < WARMUP + MOST:
        for _ in range(FEWEST):
            group.synchronize()
            started = time.perf_counter()
            engine.backward(engine(tokens))
            engine.step()
            group.synchronize()
            own.append(time.perf_counter() - started)
        if len(own) >= WARMUP + FEWEST and group.left_s() <= until_left_s:
            break
    return group.slowest(own)[WARMUP:]
