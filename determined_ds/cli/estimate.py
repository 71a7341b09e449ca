"""``det-ds estimate``: the memory that a model takes under every strategy, before there is a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from determined_ds.config.strategy import Strategy
    from determined_ds.memory import Fit, ModelShape

EPILOG = """\b
Examples:
  det-ds estimate experiments/gpt2/const.yaml --gpu-memory 24GiB
  det-ds estimate --params 6B --layers 28 --hidden 4096 --slots 8 --gpu-memory 80GiB
  det-ds estimate --hf-config path/to/config.json --gpu-memory 80GiB --activation-checkpointing
  det-ds estimate experiments/gpt2/pipeline4.yaml --schedules schedules.png
"""
DEFAULT_SLOTS = 8
PARTS = ("parameters", "gradients", "optimizer_states", "activations", "buffers", "total", "host")
# Of the same, each with its rank: where there is no room, those with the highest number go first, never those with 0.
HEADERS = {"params": 2, "grads": 3, "optim.": 1, "activ.": 1, "buffers": 4, "total": 0, "host": 0}


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Like det's --config. Repeatable."
)
@click.option("--hf-config", metavar="PATH", help="A Hugging Face config.json, or its folder.")
@click.option("--params", metavar="COUNT", help="Parameters, e.g. 6B. Loads no torch.")
@click.option("--layers", type=int, help="Transformer blocks.")
@click.option("--hidden", type=int, help="Width of the model.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--vocab", type=int, help="Tokens in the vocabulary.  [default: 50257]")
@click.option("--sequence-length", type=int, help="Tokens of a sample.")
@click.option("--slots", "--gpus", type=int, help=f"Ranks.  [default: CONFIG's, or {DEFAULT_SLOTS}]")
@click.option("--gpu-memory", metavar="SIZE", help="Of one GPU, e.g. 80GiB, to show what fits.")
@click.option("--micro-batch", type=int, help="Samples a rank computes at a time.  [default: CONFIG's, or 1]")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: CONFIG's, or bf16]")
@click.option("--activation-checkpointing", is_flag=True, help="Recompute blocks in the backward pass.")
@click.option(
    "--schedules",
    metavar="PNG",
    type=click.Path(path_type=Path),
    help="Draw CONFIG's pipeline by each schedule.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, in bytes.")
def estimate(config: Path | None, context_dir: Path, as_json: bool, **flags: Any) -> None:
    """Estimate the bytes that a rank needs under every ZeRO stage and offload, and what fits a GPU.

    The model is that of the experiment CONFIG, built without weights; or a Hugging Face one; or given by its sizes.
    Of a script it is the Hugging Face model that a hyperparameter describes. A pipeline is shown under every schedule
    that its stages and micro-batches can have.
    """
    from determined_ds.cli import expected_schedules
    from determined_ds.cli.drawn_schedules import draw_schedules
    from determined_ds.cli.expected_times import as_json as times_as_json
    from determined_ds.cli.expected_times import expected_times
    from determined_ds.memory import alternatives, fit, parse_bytes
    from determined_ds.memory.possible_schedules import schedule_fits
    from determined_ds.report.fitted import terminal_width

    _check(config, flags)
    gpu = parse_bytes(flags["gpu_memory"]) if flags["gpu_memory"] else None
    if config is None:
        shape, strategy = _of_sizes(flags)
        marked = None
    else:
        shape, strategy = _of_experiment(config, context_dir, flags)
        marked = _label(strategy)
    drawn = draw_schedules(strategy.pipeline, flags["schedules"]) if flags["schedules"] else []
    rows = [fit(shape, each, gpu) for each in alternatives(strategy)]
    times = expected_times(shape, [row.strategy for row in rows])
    schedules = schedule_fits(shape, strategy)
    if as_json:
        more = {
            "expected_times": times_as_json(times),
            "schedules": expected_schedules.as_json(schedules, strategy),
        }
        click.echo(json.dumps({**_as_json(shape, rows, gpu), **more}, indent=2))
    else:
        _show(shape, rows, gpu, marked)
        if schedules:
            click.echo("\n".join(["", *expected_schedules.lines(schedules, strategy, terminal_width())]))
        names = [_name_in_table(row.strategy, marked) for row in rows]
        click.echo("\n".join(["", *times.lines(names, terminal_width()), *drawn]))
    if gpu is not None:
        _refuse_too_small(shape, rows, gpu)


# ----------------------------------------------------------------------------------------------- the model


def _check(config: Path | None, flags: dict[str, Any]) -> None:
    """Refuse flags that contradict each other, or numbers below 1; all at once."""
    from determined_ds.errors import ConfigError, Problem

    by_sizes = [
        f"--{name}" for name in ("params", "layers", "hidden", "heads", "vocab") if flags[name] is not None
    ]
    given = (
        ["CONFIG"] * (config is not None) + ["--hf-config"] * (flags["hf_config"] is not None) + by_sizes[:1]
    )
    problems = []
    if len(given) != 1:
        message = (
            f"the model is given {len(given)} times: {', '.join(given)}" if given else "no model is given"
        )
        fix = "keep one of them" if given else "give a CONFIG, --hf-config PATH, or --params 6B"
        problems.append(Problem(key="det-ds estimate", message=message, fix=fix, code="model"))
    if flags["overrides"] and config is None:
        message = "changes a CONFIG, and none is given"
        problems.append(Problem(key="--set", message=message, fix="give a CONFIG, or remove --set"))
    for name, value in flags.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            flag = f"--{name.replace('_', '-')}"
            problems.append(Problem(key=flag, value=value, message="must be 1 or more", fix=f"e.g. {flag} 8"))
    if problems:
        raise ConfigError(problems)


def _of_sizes(flags: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of a Hugging Face model or of given sizes, and a strategy to vary."""
    from determined_ds.config.strategy import Strategy
    from determined_ds.memory import parse_count, shape_from_sizes

    slots, precision = flags["slots"] or DEFAULT_SLOTS, flags["precision"] or "bf16"
    if flags["hf_config"] is not None:
        from determined_ds.runtime.shapes.of_huggingface import shape_of_huggingface

        shape = shape_of_huggingface(
            Path(flags["hf_config"]), sequence_length=flags["sequence_length"], precision=precision
        )
    else:
        shape = shape_from_sizes(
            num_parameters=parse_count(flags["params"]) if flags["params"] else None,
            num_layers=flags["layers"],
            hidden_size=flags["hidden"],
            num_heads=flags["heads"],
            vocab_size=flags["vocab"],
            sequence_length=flags["sequence_length"],
        )
    if flags["slots"] is None:
        shape = replace(shape, assumptions=(*shape.assumptions, f"{slots} ranks (--slots)"))
    strategy = Strategy(
        precision=precision,
        replicas=slots,
        micro_batch_size=flags["micro_batch"] or 1,
        activation_checkpointing=flags["activation_checkpointing"],
    )
    return shape, strategy


def _of_experiment(config: Path, context_dir: Path, flags: dict[str, Any]) -> tuple[ModelShape, Strategy]:
    """The shape of an experiment's model, and its strategy with the flags in place."""
    from determined_ds.config.accelerator import assumed_cuda
    from determined_ds.config.resolve import Where
    from determined_ds.errors import ConfigError
    from determined_ds.experiment.code_check import check_entrypoint
    from determined_ds.experiment.decide import decide_stated, left_open, read_document
    from determined_ds.experiment.experiment import parse_experiment

    document = read_document(
        config, context_dir, slots=flags["slots"], overrides=flags["overrides"], command="estimate"
    )
    experiment = parse_experiment(document)
    check_entrypoint(experiment, context_dir)
    where = Where(context_dir=context_dir, accelerator=assumed_cuda(experiment.slots))
    resolved = decide_stated(experiment, experiment.hyperparameters, where)
    if resolved is None:
        raise ConfigError(left_open(experiment))
    strategy = resolved.strategy
    if flags["precision"] not in (None, strategy.precision):
        strategy = replace(strategy, precision=flags["precision"], grad_accum_dtype=None)
    if flags["micro_batch"]:
        strategy = replace(strategy, micro_batch_size=flags["micro_batch"])
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    shape = shape_of_experiment(experiment, resolved, context_dir, precision=strategy.precision)
    if flags["sequence_length"]:
        shape = shape.at_sequence_length(flags["sequence_length"])
    return shape, strategy.checkpointed_by(shape.checkpoint_interval or flags["activation_checkpointing"])


# ---------------------------------------------------------------------------------------------- the answer


def _label(strategy: Strategy) -> str:
    words = f"ZeRO {strategy.zero_stage}"
    if strategy.pipe_parallel_size > 1:
        words = f"pipeline {strategy.pipe_parallel_size}, {words}"
    if strategy.offload_optimizer:
        words += ", offload all" if strategy.offload_param else ", offload opt"
    return words


def _name_in_table(strategy: Strategy, marked: str | None) -> str:
    label = _label(strategy)
    return label + (" *" if label == marked else "")


def _show(shape: ModelShape, rows: list[Fit], gpu: int | None, marked: str | None) -> None:
    from determined_ds.memory.units import GIB, MIB
    from determined_ds.report.fitted import FittedColumn, FittedRow, fitted, plain, terminal_width, wrapped

    width = terminal_width()
    totals = [row.memory.total_bytes for row in rows]
    unit, size = ("GiB", GIB) if min(totals) >= GIB // 8 or max(totals) >= 64 * GIB else ("MiB", MIB)
    columns = [FittedColumn(head=(f"{unit} a rank",), no_room="above")]
    columns += [
        FittedColumn(head=(header,), align="right", no_room="drop" if rank else "keep", rank=rank)
        for header, rank in HEADERS.items()
    ]
    if gpu is not None:
        columns += [FittedColumn(head=(head,), align="right") for head in ("fits", "micro")]
    found = []
    for row in rows:
        cells = [_name_in_table(row.strategy, marked)]
        cells += [_size(getattr(row.memory, f"{part}_bytes") / size) for part in PARTS]
        if gpu is not None:
            cells += ["yes" if row.fits else "no", str(row.largest_micro_batch or "-")]
        found.append(FittedRow(cells=[(cell,) for cell in cells]))
    head, *lines = map(plain, fitted(columns, found, width))
    about, notes = (
        _heading(shape, rows[0].strategy),
        [*_footing(rows, gpu, marked), _checkpoints(shape, rows, marked)],
    )
    before, after = (
        "\n".join(part for line in texts for part in wrapped(line, width)) for texts in (about, notes)
    )
    click.echo("\n".join([before, "", click.style(head, bold=True), *lines, "", after]))


def _size(value: float) -> str:
    """Two decimals; one where there are four digits before them."""
    return f"{value:,.2f}" if value < 1000 else f"{value:,.1f}"


def _heading(shape: ModelShape, strategy: Strategy) -> list[str]:
    from determined_ds.memory import format_count
    from determined_ds.memory.activations import are_known

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
    checkpointing = ", activation checkpointing" if strategy.activation_checkpointing else ""
    sliced = (
        f", {strategy.sequence_parallel_size} to a sequence" if strategy.sequence_parallel_size > 1 else ""
    )
    tiles = (("MLPs", strategy.tiled_mlp), ("loss", strategy.tiled_loss))
    tiled = "".join(f", {what} in {number} tiles" for what, number in tiles if number > 1)
    lines.append(
        f"ranks    {strategy.slots}{sliced}, in {strategy.precision},"
        f" micro-batch {strategy.micro_batch_size}{checkpointing}{tiled}"
    )
    lines += [f"assumed  {assumption}" for assumption in shape.assumptions]
    if not are_known(shape):
        lines.append("warning  activations are unknown and not counted")
    elif shape.activations is None:
        lines.append("note     activations are computed from the sizes, for fused attention and fused GELU")
    return lines


def _checkpoints(shape: ModelShape, rows: list[Fit], marked: str | None) -> str:
    from determined_ds.memory import format_bytes
    from determined_ds.memory.estimate import checkpoint_copies_bytes

    strategy = next((row.strategy for row in rows if _label(row.strategy) == marked), rows[0].strategy)
    copies = format_bytes(checkpoint_copies_bytes(shape, strategy))
    return f"asynchronous checkpoints: {copies} of host memory a rank, two copies of what it writes"


def _footing(rows: list[Fit], gpu: int | None, marked: str | None) -> list[str]:
    from determined_ds.memory import format_bytes, usable_bytes
    from determined_ds.memory.fitting import CUDA_BYTES, FRAGMENTED

    lines = [
        "buffers: communication buckets, parameters that ZeRO 3 gathers, copies made by the optimizer's step",
        "offload opt: optimizer states in host memory; offload all: parameters too",
    ]
    if marked is not None:
        lines.insert(0, "* the strategy of CONFIG")
    if gpu is None:
        return [*lines, "--gpu-memory 80GiB shows what fits"]
    usable = usable_bytes(gpu)
    lines.append("micro: the largest micro-batch that fits")
    lines.append(
        f"usable: {format_bytes(usable)} of {format_bytes(gpu)}: {format_bytes(CUDA_BYTES)} is for CUDA,"
        f" {FRAGMENTED:.0%} of the rest for fragments"
    )
    cheapest = next((row for row in rows if row.fits), None)
    smaller = next((row for row in rows if row.largest_micro_batch), None)
    if cheapest is not None:
        micro = f"; micro-batch up to {cheapest.largest_micro_batch}" if cheapest.largest_micro_batch else ""
        needed = format_bytes(cheapest.memory.total_bytes)
        lines.append(f"cheapest that fits: {cheapest.strategy.name}, {needed}{micro}")
    elif smaller is not None:
        lines.append(
            f"none fits at micro-batch {smaller.strategy.micro_batch_size}; the first with a smaller one:"
            f" {smaller.strategy.name}, up to {smaller.largest_micro_batch}"
        )
    return lines


def _refuse_too_small(shape: ModelShape, rows: list[Fit], gpu: int) -> None:
    """Refuse a GPU that nothing fits, whatever the micro-batch."""
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.memory import fits, format_bytes, memory_per_rank
    from determined_ds.memory.fitting import device_bytes

    one_each = [replace(row.strategy, micro_batch_size=1) for row in rows]
    if any(fits(shape, each, gpu) for each in one_each):
        return
    least = min(one_each, key=lambda each: memory_per_rank(shape, each).total_bytes)
    needed = memory_per_rank(shape, least)
    more = "" if least.activation_checkpointing else ", or --activation-checkpointing"
    message = f"nothing fits, not even one sample under {least.name}: {format_bytes(needed.total_bytes)}"
    fix = f"use GPUs of {format_bytes(device_bytes(needed.total_bytes))} or more, or more --slots{more}"
    raise ConfigError(
        Problem(key="--gpu-memory", value=format_bytes(gpu), message=message, fix=fix, code="memory")
    )


def _stage_parameters(shape: ModelShape, strategy: Strategy) -> list[int]:
    """Of a pipeline; empty without one."""
    from determined_ds.memory.states import stage_parameters

    return [own for own, _ in stage_parameters(shape, strategy)] if strategy.pipe_parallel_size > 1 else []


def _as_json(shape: ModelShape, rows: list[Fit], gpu: int | None) -> dict[str, Any]:
    from determined_ds.memory import usable_bytes
    from determined_ds.memory.estimate import checkpoint_copies_bytes

    cheapest = next((row for row in rows if row.fits), None)
    return {
        "version": 1,
        "model": {
            **{
                key: value
                for key, value in asdict(shape).items()
                if key not in ("layers", "layer_element_bytes")
            },
            "stage_parameters": _stage_parameters(shape, rows[0].strategy),
        },
        "gpu_memory_bytes": gpu,
        "usable_bytes": None if gpu is None else usable_bytes(gpu),
        "strategies": [
            {
                "name": row.strategy.name,
                **asdict(row.strategy),
                "offload_optimizer": bool(row.strategy.offload_optimizer),
                "offload_param": bool(row.strategy.offload_param),
                "checkpoint_copies_bytes": checkpoint_copies_bytes(shape, row.strategy),
                **{f"{part}_bytes": getattr(row.memory, f"{part}_bytes") for part in PARTS},
                "fits": row.fits,
                "largest_micro_batch": row.largest_micro_batch,
            }
            for row in rows
        ],
        "cheapest": None if cheapest is None else cheapest.strategy.name,
    }
