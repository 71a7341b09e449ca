"""``det-ds check --memory``: the memory that a model takes under every strategy, before there is a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from determined_ds.cli.options import Count

if TYPE_CHECKING:
    from determined_ds.check.output import Report
    from determined_ds.config.strategy import Strategy
    from determined_ds.memory.fitting import Fit
    from determined_ds.memory.model import ModelShape

F = TypeVar("F", bound=Callable[..., Any])

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
OF_CANDIDATES = {"model_states": ("states", 2), **{part: PARTS[part] for part in list(PARTS)[3:]}}
COUNT, PRECISION, PNG = Count(), click.Choice(["bf16", "fp16", "fp32"]), click.Path(path_type=Path)


def memory_options(command: F) -> F:
    """The options of ``--memory``; each of them asks for it."""
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("--memory", "The bytes that a rank needs, by strategy. Loads torch.", {"is_flag": True}),
        ("--parameters", "Of a model without a CONFIG, e.g. 7B. Loads no torch.", {"metavar": "COUNT"}),
        ("--hf-config", "Memory of a Hugging Face config.json, or its folder's.", {"metavar": "PATH"}),
        ("--sequence-length", "Tokens of a sample, without a CONFIG.", {"type": COUNT}),
        ("--micro-batch-size", "For --memory.  [default: CONFIG's, or 1]", {"type": COUNT}),
        ("--precision", "For --memory.  [default: CONFIG's, or bf16]", {"type": PRECISION}),
        ("--activation-checkpointing", "For --memory: blocks are computed again.", {"is_flag": True}),
        ("--schedules", "Draw CONFIG's pipeline under each schedule.", {"type": PNG, "metavar": "PNG"}),
    ]
    for name, text, how in reversed(options):
        command = click.option(name, help=text, **how)(command)
    return command


def show_memory(
    report: Report | None, asked: dict[str, Any], *, slots: int | None, gpu_memory: str | None, as_json: bool
) -> None:
    """Print the bytes of a rank under every ZeRO stage and offload, and what fits.

    Args:
        report: Of the experiment CONFIG, in which no error was found; None where the model is given by its sizes.
        asked: The options of :func:`memory_options`, by their names.
        slots: Of a model that is given by its sizes.
        gpu_memory: Of one slot, as typed; None: what fits is not shown.
        as_json: Print one JSON object, in bytes.

    Raises:
        ConfigError: no model is given, or two; or it cannot be built.
    """
    from determined_ds.memory.fitting import Fit, alternatives, schedule_fits
    from determined_ds.memory.units import parse_bytes
    from determined_ds.report.table import terminal_width, wrapped

    gpu = None if gpu_memory is None else parse_bytes(gpu_memory)
    shape, strategy = _of_sizes(slots, asked) if report is None else _of_experiment(report, asked)
    picture = _drawn(strategy, asked["schedules"]) if asked["schedules"] else []
    rows = [Fit(shape=shape, strategy=each, gpu_memory_bytes=gpu) for each in alternatives(strategy)]
    schedules = schedule_fits(shape, strategy)
    own = None if report is None else strategy_label(strategy)
    if as_json:
        click.echo(json.dumps(_as_json(shape, strategy, own, rows, gpu, schedules), indent=2))
        return
    names = [strategy_label(row.strategy) for row in rows]
    lines = [*_heading(shape, strategy), ""]
    lines += memory_table([f"{name} *" if name == own else name for name in names], rows, gpu)
    lines += ["", *(["* the strategy of CONFIG"] if own else []), *_verdict(shape, strategy, rows, gpu)]
    lines += schedules_table(schedules, strategy)
    for line in lines:
        click.echo("\n".join(wrapped(line, terminal_width())) if line else "")
    for line in picture:  # a path is copied from here: it is not wrapped
        click.echo(line)


def _of_sizes(slots: int | None, asked: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of a Hugging Face model or of given sizes, and a strategy to vary."""
    from determined_ds.config.strategy import Strategy
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.memory.model import shape_from_sizes
    from determined_ds.memory.units import parse_count

    given = [f"--{name.replace('_', '-')}" for name in ("parameters", "hf_config") if asked[name] is not None]
    if slots is not None and slots < 1:
        message, fix = "must be 1 or more", f"e.g. --slots {DEFAULT_SLOTS}"
        raise ConfigError(Problem(key="--slots", value=slots, message=message, fix=fix))
    if len(given) != 1 or asked["schedules"]:
        message = f"the model is given twice: {', '.join(given)}" if given else "no model is given"
        fix = "keep one of them" if given[1:] else "give a CONFIG, --hf-config PATH, or --parameters 6B"
        if len(given) == 1:
            message, fix = "--schedules draws the pipeline of a CONFIG", "give a CONFIG, or leave it out"
        raise ConfigError(Problem(key="--memory", message=message, fix=fix, code="model"))
    precision, length = asked["precision"] or "bf16", asked["sequence_length"]
    if asked["hf_config"] is not None:
        from determined_ds.train.shape import shape_of_huggingface

        shape = shape_of_huggingface(Path(asked["hf_config"]), sequence_length=length, precision=precision)
    else:
        count = parse_count(asked["parameters"])
        shape = shape_from_sizes(num_parameters=count, sequence_length=length)
    if slots is None:
        shape = replace(shape, assumptions=(*shape.assumptions, f"{DEFAULT_SLOTS} ranks (--slots)"))
    return shape, Strategy(
        precision=precision,
        replicas=slots or DEFAULT_SLOTS,
        micro_batch_size=asked["micro_batch_size"] or 1,
        activation_checkpointing=asked["activation_checkpointing"],
    )


def _of_experiment(report: Report, asked: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of an experiment's model, and its strategy with the options in place."""
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.decide import left_open

    experiment, resolved = report.experiment, report.resolved
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("parameters", "hf_config", "sequence_length")
        if asked[name] is not None
    ]
    if given:
        message = f"the model is given twice: CONFIG and {', '.join(given)}"
        raise ConfigError(Problem(key="--memory", message=message, fix="keep one of them", code="model"))
    if experiment is None or report.context_dir is None:
        message = "is not an experiment of determined_ds, whose model could be built"
        fix = "give an experiment's YAML, --hf-config PATH, or --parameters 6B"
        raise ConfigError(Problem(key="--memory", value=report.file, message=message, fix=fix))
    if resolved is None:
        raise ConfigError(left_open(experiment))
    strategy = resolved.strategy
    if asked["precision"] not in (None, strategy.precision):
        strategy = replace(strategy, precision=asked["precision"], grad_accum_dtype=None)
    if asked["micro_batch_size"]:
        strategy = replace(strategy, micro_batch_size=asked["micro_batch_size"])
    from determined_ds.train.shape import shape_of_experiment  # loads torch

    shape = shape_of_experiment(experiment, resolved, report.context_dir, precision=strategy.precision)
    return shape, strategy.checkpointed_by(shape.checkpoint_interval or asked["activation_checkpointing"])


# ---------------------------------------------------------------------------------------------- the answer


def memory_table(
    names: Sequence[str], rows: Sequence[Fit], gpu: int | None, *, as_candidates: bool = False
) -> list[str]:
    """The bytes of a rank by strategy; for a GPU also whether it fits, what is spare, and the micro-batch.

    Args:
        names: Of the rows.
        rows: Strategies with their bytes.
        gpu: Memory of a GPU; None: what fits is not shown.
        as_candidates: Model states are one number; the micro-batch is the strategy's own, not the largest that fits.
    """
    from determined_ds.memory.fitting import usable_bytes
    from determined_ds.report.numbers import byte_unit
    from determined_ds.report.table import Head, Table

    parts = OF_CANDIDATES if as_candidates else PARTS
    unit, size = byte_unit(row.memory.total_bytes for row in rows)
    heads = [Head(text=f"{unit} a rank")]
    heads += [Head(text=head, align="right", drop=rank) for head, rank in parts.values()]
    if gpu is not None:
        heads += [Head(text=head, align="right") for head in ("fits", "spare", "micro")]

    def number(num_bytes: int) -> str:
        return f"{num_bytes / size:,.{2 if abs(num_bytes) < 1000 * size else 1}f}"

    found = []
    for name, row in zip(names, rows, strict=True):
        texts = [name, *(number(getattr(row.memory, f"{part}_bytes")) for part in parts)]
        if gpu is not None:
            micro = row.strategy.micro_batch_size if as_candidates else row.largest_micro_batch
            spare = number(usable_bytes(gpu) - row.memory.total_bytes)
            texts += ["yes" if row.fits else "no", spare, str(micro or "-")]
        found.append(texts)
    return Table(heads=heads, rows=found).lines()


def schedules_table(found: Sequence[Fit], own: Strategy) -> list[str]:
    """The schedules that a pipeline could have, its own marked; nothing without a pipeline."""
    from determined_ds.memory.units import format_bytes
    from determined_ds.pipe.timeline import most_held
    from determined_ds.report.table import Head, Table

    if not found:
        return []

    def by_rank(texts: Sequence[str]) -> str:
        """One for each rank; of many, the first and the last."""
        return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", *texts[-2:]])

    heads = [Head(text="schedule"), *(Head(text=text, align="right") for text in ("chunks", "bubble"))]
    heads += [Head(text=text, folds=True) for text in ("held by rank", "bytes by rank")]
    rows = []
    for each in found:
        cells = [each.strategy.pipe_schedule + " *" * (each.strategy == own), str(each.strategy.pipe_chunks)]
        cells += [
            f"{each.strategy.bubble:.1%}",
            by_rank([str(count) for count in most_held(each.strategy.pipeline)]),
        ]
        cells += [by_rank([format_bytes(stage.total_bytes) for stage in each.stages])]
        rows.append(cells)
    notes = [
        "held: the most micro-batches, each of one chunk, whose activations a rank holds at a time",
        "bubble: the share of time in which ranks wait, by the schedule alone",
    ]
    about = f"schedules of {own.pipe_parallel_size} stages and {own.accumulation} micro-batches"
    return ["", about, *Table(heads=heads, rows=rows, notes=notes).lines()]


def strategy_label(strategy: Strategy) -> str:
    """A strategy in the tables: its ZeRO stage, what is offloaded, and the stages of a pipeline."""
    words = f"ZeRO {strategy.zero_stage}"
    if strategy.pipe_parallel_size > 1:
        words = f"pipeline {strategy.pipe_parallel_size}, {words}"
    if strategy.offload_optimizer:
        words += ", offload all" if strategy.offload_param else ", offload opt"
    return words


def _heading(shape: ModelShape, strategy: Strategy) -> list[str]:
    from determined_ds.memory.units import format_count

    sizes = {
        "{:,} layers": shape.num_layers,
        "{:,} wide": shape.hidden_size,
        "vocabulary of {:,}": shape.vocab_size,
        "samples of {:,} tokens": shape.sequence_length,
    }
    known = ", ".join(text.format(number) for text, number in sizes.items() if number)
    frozen = shape.num_parameters - shape.trainable
    trained = f", {format_count(frozen)} of them frozen" if frozen else ""
    lines = [f"model    {format_count(shape.num_parameters)} parameters{trained}{': ' * bool(known)}{known}"]
    ranks = f"ranks    {strategy.slots}"
    if strategy.sequence_parallel_size > 1:
        ranks += f", {strategy.sequence_parallel_size} to a sequence"
    ranks += f", in {strategy.precision}, micro-batch {strategy.micro_batch_size}"
    ranks += ", activation checkpointing" if strategy.activation_checkpointing else ""
    tiles = {"MLPs": strategy.tiled_mlp, "loss": strategy.tiled_loss}
    ranks += "".join(f", {what} in {number} tiles" for what, number in tiles.items() if number > 1)
    lines += [ranks, *(f"assumed  {assumption}" for assumption in shape.assumptions)]
    if not shape.knows_activations:
        lines.append("warning  activations are unknown and not counted")
    elif shape.activations is None:
        lines.append("note     activations are computed from the sizes, for fused attention and fused GELU")
    return lines


def _verdict(shape: ModelShape, strategy: Strategy, rows: Sequence[Fit], gpu: int | None) -> list[str]:
    from determined_ds.memory.fitting import CUDA_BYTES, FRAGMENTED, device_bytes, usable_bytes
    from determined_ds.memory.rank import checkpoint_copies_bytes
    from determined_ds.memory.units import format_bytes

    copies = format_bytes(checkpoint_copies_bytes(shape, strategy))
    lines = [
        "buffers: communication buckets, parameters that ZeRO 3 gathers, copies made by the optimizer's step",
        f"asynchronous checkpoints: {copies} of host memory a rank, two copies of what it writes",
    ]
    if gpu is None:
        return [*lines, "--gpu-memory 80GiB shows what fits"]
    lines.append(
        f"usable: {format_bytes(usable_bytes(gpu))} of {format_bytes(gpu)}: {format_bytes(CUDA_BYTES)} is for CUDA,"
        f" {FRAGMENTED:.0%} of the rest for fragments; micro: the largest micro-batch that fits"
    )
    cheapest = next((row for row in rows if row.fits), None)
    smaller = next((row for row in rows if row.largest_micro_batch), None)
    if cheapest is not None:
        total, micro = format_bytes(cheapest.memory.total_bytes), cheapest.largest_micro_batch
        more = f"; micro-batch up to {micro}" if micro else ""
        return [*lines, f"cheapest that fits: {cheapest.strategy.name}, {total}{more}"]
    if smaller is not None:
        said = f"none fits at micro-batch {smaller.strategy.micro_batch_size}; the first with a smaller one: "
        return [*lines, f"{said}{smaller.strategy.name}, up to {smaller.largest_micro_batch}"]
    one_each = [replace(row, strategy=replace(row.strategy, micro_batch_size=1)) for row in rows]
    least = min(one_each, key=lambda each: each.memory.total_bytes)
    needed, device = least.memory.total_bytes, device_bytes(least.memory.total_bytes)
    more = "" if least.strategy.activation_checkpointing else ", or --activation-checkpointing"
    return [
        *lines,
        f"nothing fits, not even one sample under {least.strategy.name}: {format_bytes(needed)}",
        f"  fix: use GPUs of {format_bytes(device)} or more, or more --slots{more}",
    ]


def _drawn(strategy: Strategy, path: Path) -> list[str]:
    """Draw every schedule of a pipeline's ranks and micro-batches; what was written, and what could not be drawn."""
    import importlib.util

    from determined_ds.errors import ConfigError, Problem

    def refuse(message: str, fix: str) -> ConfigError:
        return ConfigError(Problem(key="--schedules", value=str(path), message=message, fix=fix))

    pipe = strategy.pipeline
    if pipe.ranks < 2:
        raise refuse("draws a pipeline, and CONFIG has none", "--set hyperparameters.pipe_parallel_size=2")
    if importlib.util.find_spec("matplotlib") is None:
        raise refuse("draws with matplotlib, which is not installed", "pip install matplotlib")
    from determined_ds.report.gantt import planned_picture
    from determined_ds.report.style import png_of

    picture, problems = planned_picture(pipe.ranks, pipe.micro_batches, max(2, pipe.chunks))
    try:
        path.write_bytes(png_of(picture))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise refuse(message, "name a file in a folder that exists") from None
    return [str(path), *(f"not drawn: {problem}" for problem in problems)]


def _as_json(
    shape: ModelShape,
    own: Strategy,
    label: str | None,
    rows: Sequence[Fit],
    gpu: int | None,
    schedules: Sequence[Fit],
) -> dict[str, Any]:
    from determined_ds.memory.fitting import usable_bytes
    from determined_ds.memory.parts import stage_parameters
    from determined_ds.memory.rank import checkpoint_copies_bytes
    from determined_ds.pipe.timeline import most_held

    first = rows[0].strategy
    stages = stage_parameters(shape, first) if first.pipe_parallel_size > 1 else []
    model = {key: value for key, value in asdict(shape).items() if not key.startswith("layer")}
    strategies = [
        {
            "name": row.strategy.name,
            "is_configured": strategy_label(row.strategy) == label,
            **asdict(row.strategy),
            "offload_optimizer": bool(row.strategy.offload_optimizer),
            "offload_param": bool(row.strategy.offload_param),
            "checkpoint_copies_bytes": checkpoint_copies_bytes(shape, row.strategy),
            **{f"{part}_bytes": getattr(row.memory, f"{part}_bytes") for part in PARTS},
            "fits": row.fits,
            "largest_micro_batch": row.largest_micro_batch,
        }
        for row in rows
    ]
    stage_keys = ("total_bytes", "activations_bytes", "model_states_bytes")
    return {
        "version": 1,
        "model": {**model, "stage_parameters": [in_all for in_all, _ in stages]},
        "gpu_memory_bytes": gpu,
        "usable_bytes": None if gpu is None else usable_bytes(gpu),
        "strategies": strategies,
        "cheapest": next((each["name"] for each in strategies if each["fits"]), None),
        "schedules": [
            {
                "schedule": each.strategy.pipe_schedule,
                "chunks": each.strategy.pipe_chunks,
                "is_configured": label is not None and each.strategy == own,
                "bubble": each.strategy.bubble,
                "most_held": most_held(each.strategy.pipeline),
                "stages": [{key: getattr(stage, key) for key in stage_keys} for stage in each.stages],
            }
            for each in schedules
        ],
    }
