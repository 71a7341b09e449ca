"""``det-ds check --memory``: the memory that a model takes under every strategy, before there is a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from determined_ds.check.output import Report
from determined_ds.config.strategy import Strategy
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import left_open
from determined_ds.memory.fitting import (
    CUDA_BYTES,
    FRAGMENTED,
    Fit,
    alternatives,
    device_bytes,
    schedule_fits,
    usable_bytes,
)
from determined_ds.memory.model import ModelShape, shape_from_sizes
from determined_ds.memory.units import format_bytes, format_count, parse_bytes, parse_count
from determined_ds.pipe.timeline import most_held
from determined_ds.report.numbers import Head, Table, byte_unit, terminal_width, wrapped

DEFAULT_SLOTS = 8
# Of the JSON -> its column, and its rank: where there is no room, those of the highest go first, never those of 0.
PARTS = {
    "parameters": ("params", 2),
    "gradients": ("grads", 3),
    "optimizer_states": ("optim.", 1),
    "activations": ("activ.", 1),
    "buffers": ("buffers", 4),
    "total": ("total", 0),
    "host": ("host", 5),
}
BUFFERS = (
    "buffers: communication buckets, parameters that ZeRO 3 gathers, copies made by the optimizer's step"
)
OF_SCHEDULES = (
    "held: the most micro-batches, each of one chunk, whose activations a rank holds at a time",
    "bubble: the share of time in which ranks wait, by the schedule alone",
)


def show_memory(
    report: Report | None, asked: dict[str, Any], *, slots: int | None, gpu_memory: str | None, as_json: bool
) -> None:
    """Print the bytes of a rank under every ZeRO stage and offload, and what fits.

    ``report`` is of the experiment CONFIG, or None where the model is given by its sizes, in ``asked``.
    """
    gpu = None if gpu_memory is None else parse_bytes(gpu_memory)
    shape, strategy = _of_sizes(slots, asked) if report is None else _of_experiment(report, asked)
    rows = [Fit(shape=shape, strategy=each, gpu_memory_bytes=gpu) for each in alternatives(strategy)]
    schedules, own = schedule_fits(shape, strategy), None if report is None else strategy_label(strategy)
    names = [strategy_label(row.strategy) for row in rows]
    cheapest = next((row for row in rows if row.fits), None)
    if not as_json:
        lines = [*_heading(shape, strategy), ""]
        lines += memory_table([f"{name} *" if name == own else name for name in names], rows, gpu)
        lines += ["", *(["* the strategy of CONFIG"] if own else []), BUFFERS, *_verdict(rows, cheapest, gpu)]
        lines += _schedules_table(schedules, strategy) if schedules else []
        for line in lines:
            click.echo("\n".join(wrapped(line, terminal_width())))
        return
    stage_keys = ("total_bytes", "activations_bytes", "model_states_bytes")
    found = {
        "version": 1,
        "model": {key: value for key, value in asdict(shape).items() if not key.startswith("layer")},
        "gpu_memory_bytes": gpu,
        "usable_bytes": None if gpu is None else usable_bytes(gpu),
        "strategies": [
            {
                "name": row.strategy.name,
                "is_configured": name == own,
                **asdict(row.strategy),
                **{f"{part}_bytes": getattr(row.memory, f"{part}_bytes") for part in PARTS},
                "fits": row.fits,
                "largest_micro_batch": row.largest_micro_batch,
            }
            for name, row in zip(names, rows, strict=True)
        ],
        "cheapest": cheapest and cheapest.strategy.name,
        "schedules": [
            {
                "schedule": each.strategy.pipe_schedule,
                "chunks": each.strategy.pipe_chunks,
                "is_configured": own is not None and each.strategy == strategy,
                "bubble": each.strategy.bubble,
                "most_held": most_held(each.strategy.pipeline),
                "stages": [{key: getattr(stage, key) for key in stage_keys} for stage in each.stages],
            }
            for each in schedules
        ],
    }
    click.echo(json.dumps(found, indent=2))


# ---------------------------------------------------------------------------------------------- the question


def _refusal(message: str, fix: str, value: object = None, key: str = "--memory") -> ConfigError:
    return ConfigError(Problem(key=key, value=value or NOT_GIVEN, message=message, fix=fix, code="model"))


def _of_sizes(slots: int | None, asked: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of a model of given sizes, and a strategy to vary."""
    if asked["parameters"] is None:
        raise _refusal("no model is given", "give a CONFIG, or --parameters 6B")
    num, length = parse_count(asked["parameters"]), asked["sequence_length"]
    shape = shape_from_sizes(num_parameters=num, sequence_length=length)
    if slots is None:
        shape = replace(shape, assumptions=(*shape.assumptions, f"{DEFAULT_SLOTS} ranks (--slots)"))
    elif slots < 1:
        raise _refusal("must be 1 or more", f"e.g. --slots {DEFAULT_SLOTS}", slots, "--slots")
    return shape, Strategy(
        precision=asked["precision"] or "bf16",
        replicas=slots or DEFAULT_SLOTS,
        micro_batch_size=asked["micro_batch_size"] or 1,
        activation_checkpointing=asked["activation_checkpointing"],
    )


def _of_experiment(report: Report, asked: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of an experiment's model, and its strategy with the options in place."""
    experiment, resolved = report.experiment, report.resolved
    given = [f"--{name.replace('_', '-')}" for name in ("parameters", "sequence_length") if asked[name]]
    if given:
        raise _refusal(f"the model is given twice: CONFIG and {', '.join(given)}", "keep one of them")
    if experiment is None or report.context_dir is None:
        fix = "give an experiment's YAML, or --parameters 6B"
        raise _refusal("is not an experiment of determined_ds, whose model could be built", fix, report.file)
    if resolved is None:
        raise ConfigError(left_open(experiment))
    strategy = resolved.strategy
    if asked["precision"] not in (None, strategy.precision):
        strategy = replace(strategy, precision=asked["precision"], grad_accum_dtype=None)
    strategy = replace(strategy, micro_batch_size=asked["micro_batch_size"] or strategy.micro_batch_size)
    from determined_ds.train.shape import shape_of_experiment  # loads torch

    shape = shape_of_experiment(experiment, resolved, report.context_dir, precision=strategy.precision)
    return shape, strategy.checkpointed_by(shape.checkpoint_interval or asked["activation_checkpointing"])


# ---------------------------------------------------------------------------------------------- the answer


def memory_table(
    names: Sequence[str], rows: Sequence[Fit], gpu: int | None, *, chosen: bool = False
) -> list[str]:
    """The bytes of a rank by strategy; for a GPU also whether it fits, what is spare, and the micro-batch.

    With ``chosen``, the micro-batch is the strategy's own, not the largest that fits.
    """
    unit, size = byte_unit(row.memory.total_bytes for row in rows)
    heads = [Head(text=f"{unit} a rank")]
    heads += [Head(text=head, align="right", drop=rank) for head, rank in PARTS.values()]
    heads += [Head(text=head, align="right") for head in ("fits", "spare", "micro") if gpu is not None]

    def number(num_bytes: int) -> str:
        return f"{num_bytes / size:,.{2 if abs(num_bytes) < 1000 * size else 1}f}"

    found = []
    for name, row in zip(names, rows, strict=True):
        found.append([name, *(number(getattr(row.memory, f"{part}_bytes")) for part in PARTS)])
        if gpu is not None:
            micro = row.strategy.micro_batch_size if chosen else row.largest_micro_batch
            spare = number(usable_bytes(gpu) - row.memory.total_bytes)
            found[-1] += ["yes" if row.fits else "no", spare, str(micro or "-")]
    return Table(heads=heads, rows=found).lines()


def strategy_label(strategy: Strategy) -> str:
    """A strategy in the tables: its ZeRO stage, what is offloaded, and the stages of a pipeline."""
    stages = strategy.pipe_parallel_size
    words = f"pipeline {stages}, " * (stages > 1) + f"ZeRO {strategy.zero_stage}"
    offloaded = "all" if strategy.offload_param else "opt"
    return words + f", offload {offloaded}" * bool(strategy.offload_optimizer)


def _schedules_table(found: Sequence[Fit], own: Strategy) -> list[str]:
    """The schedules that a pipeline could have, its own marked; of many ranks, the first and the last."""
    heads = [Head(text="schedule"), *(Head(text=text, align="right") for text in ("chunks", "bubble"))]
    heads += [Head(text=text, folds=True) for text in ("held by rank", "bytes by rank")]
    rows = []
    for each in found:
        name = each.strategy.pipe_schedule + " *" * (each.strategy == own)
        held = [str(most) for most in most_held(each.strategy.pipeline)]
        by_rank = [
            ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", *texts[-2:]])
            for texts in (held, [format_bytes(stage.total_bytes) for stage in each.stages])
        ]
        rows.append([name, str(each.strategy.pipe_chunks), f"{each.strategy.bubble:.1%}", *by_rank])
    about = f"schedules of {own.pipe_parallel_size} stages and {own.accumulation} micro-batches"
    return ["", about, *Table(heads=heads, rows=rows, notes=OF_SCHEDULES).lines()]


def _heading(shape: ModelShape, strategy: Strategy) -> list[str]:
    sizes = {
        "{:,} layers": shape.num_layers,
        "{:,} wide": shape.hidden_size,
        "vocabulary of {:,}": shape.vocab_size,
        "samples of {:,} tokens": shape.sequence_length,
    }
    known = ", ".join(text.format(number) for text, number in sizes.items() if number)
    frozen = shape.num_parameters - shape.trainable
    trained = f", {format_count(frozen)} of them frozen" if frozen else ""
    ranks = f"ranks    {strategy.slots}, in {strategy.precision}, micro-batch {strategy.micro_batch_size}"
    lines = [
        f"model    {format_count(shape.num_parameters)} parameters{trained}{': ' * bool(known)}{known}",
        ranks + ", activation checkpointing" * bool(strategy.activation_checkpointing),
        *(f"assumed  {assumption}" for assumption in shape.assumptions),
    ]
    if not shape.knows_activations:
        lines.append("warning  activations are unknown and not counted")
    elif shape.activations is None:
        lines.append("note     activations are computed from the sizes, for fused attention and fused GELU")
    return lines


def _verdict(rows: Sequence[Fit], cheapest: Fit | None, gpu: int | None) -> list[str]:
    if gpu is None:
        return ["--gpu-memory 80GiB shows what fits"]
    usable = (
        f"usable: {format_bytes(usable_bytes(gpu))} of {format_bytes(gpu)}: {format_bytes(CUDA_BYTES)} is for CUDA,"
        f" {FRAGMENTED:.0%} of the rest for fragments; micro: the largest micro-batch that fits"
    )
    if cheapest is not None:
        needed = format_bytes(cheapest.memory.total_bytes)
        return [usable, f"cheapest that fits: {cheapest.strategy.name}, {needed}"]
    least = min(rows, key=lambda each: each.memory.total_bytes)
    device = format_bytes(device_bytes(least.memory.total_bytes))
    return [
        usable,
        f"none fits at this micro-batch; {least.strategy.name} needs least",
        f"  fix: use GPUs of {device} or more, more --slots, --activation-checkpointing, or a smaller micro-batch",
    ]
