"""``det-ds bench``: what this machine, or the slots of this task, can do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.options import Names, Numbers

if TYPE_CHECKING:
    from determined_ds.bench.by_runs import BenchPoint
    from determined_ds.bench.in_ranks import Ended
    from determined_ds.bench.plan import BenchPlace
    from determined_ds.protocol.machine_file import MachineFigures
    from determined_ds.runtime.benching.bench_request import BenchRequest

SECONDS = 60
DTYPES = ("float32", "bfloat16", "float16")
EPILOG = """\b
Examples:
  det-ds bench communication
  det-ds bench communication --slots 2 --accelerator cpu --seconds 20
  srun --ntasks 16 det-ds bench communication      # over machines, as det-ds run
  det-ds bench memory --models 6x384
  det-ds bench training --micro-batches 1,4
  det-ds bench training --config experiments/gpt2/const.yaml --vary hyperparameters.global_batch_size=8,32
  det-ds bench checkpoint --model 6x384

\b
Figures are kept in a file of this machine (DETERMINED_DS_MACHINE names another), where det-ds profile takes the peak
from; a later measurement of one kind keeps those of the others.
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure what this machine, or the slots of this task, can do."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every kind has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object."),
        click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/bench_<kind>/<time>."),
        click.option(
            "--seconds", type=click.FloatRange(min=1), default=SECONDS, show_default=True, help="At most."
        ),
        click.option(
            "--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where available."
        ),
        click.option("--slots", type=click.IntRange(min=1), help="Ranks.  [default: one a GPU; 2 on a CPU]"),
    ):
        command = option(command)
    return command


def _precision(command: Callable[..., None]) -> Callable[..., None]:
    choice = click.Choice(["fp32", "bf16", "fp16"])
    return click.option("--precision", type=choice, help="[default: bf16 where GPUs have it, else fp32]")(
        command
    )


def _config(command: Callable[..., None]) -> Callable[..., None]:
    """The experiment that is measured instead of our own model."""
    path = click.Path(path_type=Path)
    for option in (
        click.option(
            "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Of --config. Repeatable."
        ),
        click.option("--context-dir", type=path, default=".", help="Of --config: the code.  [default: .]"),
        click.option("--config", type=path, help="An experiment to measure instead."),
    ):
        command = option(command)
    return command


@bench.command()
@click.option("--collectives", type=Names(), help="Which.  [default: all]")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Of the elements."
)
@click.option("--largest", help="Largest size, e.g. 64MiB.  [default: 64MiB on a CPU, 1GiB on GPUs]")
@_common
def communication(
    collectives: list[str] | None,
    dtype: str,
    largest: str | None,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Time all-reduce, reduce-scatter, all-gather, send, broadcast and all-to-all between ranks, by size.

    By the backend that training uses here, through torch and, in turns with it, through DeepSpeed with its own log.
    Started by torchrun, srun, mpirun or deepspeed, the command is one of the ranks and starts none.
    """
    from determined_ds.bench.plan import LARGEST_BYTES, check_words, decide_where
    from determined_ds.memory.units import parse_bytes
    from determined_ds.protocol.machine_figures import COLLECTIVES, COMMUNICATION
    from determined_ds.runtime.benching.bench_request import BenchRequest

    names = list(COLLECTIVES) if collectives is None else collectives
    check_words("--collectives", names, COLLECTIVES)
    where = decide_where(COMMUNICATION, **given)
    size = LARGEST_BYTES[where.accelerator.name] if largest is None else parse_bytes(largest, key="--largest")
    request = BenchRequest(
        bench=COMMUNICATION,
        accelerator=where.accelerator.name,
        seconds=seconds,
        command=_command(),
        collectives=tuple(names),
        dtype=dtype,
        largest_bytes=size,
    )
    _measure(where, request, as_json)


@bench.command()
@click.option(
    "--models", type=Names(), help="LAYERSxWIDTH,...  [default: 4x256,6x512 on a CPU, GPT-2's on GPUs]"
)
@click.option("--strategies", type=Names(), help="Of those of compare.  [default: ZeRO 0 to 3, and offload]")
@_precision
@_common
def memory(
    models: list[str] | None,
    strategies: list[str] | None,
    precision: str | None,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Train a step of transformers under each ZeRO stage, and compare what the ranks held with the estimate.

    Also the bandwidth of memory, and between a GPU and its host.
    """
    from determined_ds.bench.plan import HELD_MODELS, STRATEGIES, check_precision, check_words, decide_where
    from determined_ds.protocol.machine_figures import MEMORY
    from determined_ds.runtime.benching.bench_request import BenchRequest

    names = list(STRATEGIES) if strategies is None else strategies
    check_words("--strategies", names, STRATEGIES)
    where = decide_where(MEMORY, **given)
    kind = where.accelerator.name
    request = BenchRequest(
        bench=MEMORY,
        accelerator=kind,
        seconds=seconds,
        command=_command(),
        models=_known_models(models or HELD_MODELS[kind], kind),
        strategies=tuple(names),
        precision=check_precision(precision, where.accelerator),
    )
    _measure(where, request, as_json)


@bench.command()
@click.option("--models", type=Names(), help="LAYERSxWIDTH,...  [default: 4x128,6x256,8x512 on a CPU]")
@click.option("--micro-batches", type=Numbers(), help="Samples of a rank.  [default: 1,4,16 on a CPU]")
@click.option("--strategy", help="Of those of compare.  [default: zero1]")
@_precision
@_config
@click.option(
    "--vary", multiple=True, metavar="KEY=V,V", help="Of --config: a run for each value. Repeatable."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Of --config: steps to time."
)
@_common
def training(
    models: list[str] | None,
    micro_batches: list[int] | None,
    strategy: str | None,
    precision: str | None,
    config: Path | None,
    context_dir: Path,
    overrides: tuple[str, ...],
    vary: tuple[str, ...],
    steps: int,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Time steps over sizes of models and batches, beside the peak of the device in matrix products.

    Of transformers on random tokens, or of the experiment --config with the values of --vary.
    """
    from determined_ds.bench.plan import (
        MICRO_BATCHES,
        MODELS,
        STRATEGIES,
        check_precision,
        check_words,
        decide_where,
    )
    from determined_ds.protocol.machine_figures import TRAINING
    from determined_ds.runtime.benching.bench_request import BenchRequest

    own = {
        "--models": models,
        "--micro-batches": micro_batches,
        "--strategy": strategy,
        "--precision": precision,
    }
    of_config = {"--vary": vary, "--set": overrides}
    _either_or(config, own, of_config)
    check_words("--strategy", [strategy or "zero1"], STRATEGIES)
    alone = "with --config, every run starts its own ranks" if config else ""
    where = decide_where(TRAINING, **given, alone=alone)
    kind = where.accelerator.name
    request = BenchRequest(
        bench=TRAINING,
        accelerator=kind,
        seconds=seconds,
        command=_command(),
        models=() if config else _known_models(models or MODELS[kind], kind),
        strategies=(strategy or "zero1",),
        precision=check_precision(precision, where.accelerator),
        micro_batches=tuple(micro_batches or MICRO_BATCHES[kind]),
    )
    if config is None:
        _measure(where, request, as_json)
        return
    from determined_ds.bench.by_runs import MeasuredExperiment, points_of

    measured = MeasuredExperiment(config=config, context_dir=context_dir, overrides=overrides)
    _steps_of(points_of(measured, where, vary), steps, where, request, as_json)


@bench.command()
@click.option("--model", help="LAYERSxWIDTH.  [default: 8x512 on a CPU, 24x1024 on GPUs]")
@click.option("--strategy", help="zero0 to zero3.  [default: zero1]")
@_config
@click.option("--storage", is_flag=True, help="Of --config: measure its checkpoint_storage.")
@_common
def checkpoint(
    model: str | None,
    strategy: str | None,
    config: Path | None,
    context_dir: Path,
    overrides: tuple[str, ...],
    storage: bool,
    seconds: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Time checkpoints: written at once, while training continues, read back; beside a copy of their files.

    Of a transformer, or of the experiment --config; to the run directory's disk, or to the experiment's
    checkpoint_storage.
    """
    from dataclasses import replace

    from determined_ds.bench.by_runs import MeasuredExperiment, own_experiment, points_of, timed_checkpoints
    from determined_ds.bench.plan import MODELS, check_words, decide_where
    from determined_ds.protocol.machine_figures import CHECKPOINT

    _either_or(config, {"--model": model, "--strategy": strategy}, {"--storage": storage, "--set": overrides})
    check_words("--strategy", [strategy or "zero1"], ("zero0", "zero1", "zero2", "zero3"))
    where = decide_where(CHECKPOINT, **given, alone="bench checkpoint starts its own ranks")
    if config is None:
        [name] = _known_models([model or MODELS[where.accelerator.name][-1]], where.accelerator.name)
        measured = own_experiment(where, model=name, zero_stage=int((strategy or "zero1")[-1]))
    else:
        measured = MeasuredExperiment(config=config, context_dir=context_dir, overrides=overrides)
    [point] = points_of(measured, where, (), storage=storage)
    _announce(where, CHECKPOINT, seconds)
    with _interruptible():
        figures = timed_checkpoints(point, seconds, _say)
    [signed] = figures.measured
    _show(replace(figures, measured=(replace(signed, command=_command()),)), where.run_dir, as_json)


def _steps_of(
    points: list[BenchPoint], steps: int, where: BenchPlace, request: BenchRequest, as_json: bool
) -> None:
    """Measure the peaks of the device in ranks, then time the points of an experiment."""
    from determined_ds.bench.by_runs import timed_steps, with_steps

    ended = _in_ranks(where, request)
    if ended.machine is None:
        sys.exit(ended.code)
    with _interruptible():
        timed, notes = timed_steps(points, steps, request.seconds, _say)
    _show(with_steps(ended.machine, timed, notes), where.run_dir, as_json)


def _either_or(config: Path | None, own: dict[str, Any], of_config: dict[str, Any]) -> None:
    """Refuse options that have no effect: those of our models beside --config, and the reverse."""
    from determined_ds.errors import ConfigError, Problem

    useless = own if config is not None else of_config
    message = "has no effect beside --config" if config is not None else "is for --config"
    fix = "leave one of them out" if config is not None else "add --config CONFIG, or leave it out"
    problems = [
        Problem(key=name, message=message, fix=fix, code="option") for name, value in useless.items() if value
    ]
    if problems:
        raise ConfigError(problems)


def _known_models(names: Iterable[str], accelerator: str) -> tuple[str, ...]:
    from determined_ds.runtime.benching.model_sizes import shape_named

    for name in names:
        shape_named(name, accelerator)
    return tuple(names)


def _command() -> str:
    from determined_ds.experiment.secrets import masked_command

    return masked_command(["det-ds", *sys.argv[1:]])


def _say(line: str) -> None:
    click.echo(f"  {line}", err=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command as it ends others."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def _announce(where: BenchPlace, bench: str, seconds: float) -> None:
    """Check that the figures can be kept, and print what will be measured for how long."""
    from determined_ds.bench.figures_kept import check_kept
    from determined_ds.devices import hardware_here
    from determined_ds.protocol.machine_file import machine_path

    hardware = hardware_here(where.accelerator)
    check_kept(machine_path(hardware))
    click.echo(f"{bench}: {where}; about {seconds:.0f} s after the start", err=True)
    _say(str(hardware))


def _in_ranks(where: BenchPlace, request: BenchRequest) -> Ended:
    """Measure in ranks."""
    from determined_ds.bench.in_ranks import measure_in_ranks

    if where.is_chief:
        _announce(where, request.bench, request.seconds)
    return measure_in_ranks(where, request)


def _measure(where: BenchPlace, request: BenchRequest, as_json: bool) -> None:
    """Measure in ranks, keep the figures and show them; ends the process."""
    ended = _in_ranks(where, request)
    if ended.machine is not None:
        _show(ended.machine, where.run_dir, as_json)
    sys.stdout.flush()
    sys.stderr.flush()
    if where.placed is not None:  # threads of the process group may wait for a peer that is gone
        os._exit(ended.code)
    sys.exit(ended.code)


def _show(machine: MachineFigures, run_dir: Path, as_json: bool) -> None:
    from determined_ds.bench.figure_lines import lines_of
    from determined_ds.bench.figures_kept import keep
    from determined_ds.protocol.machine_file import machine_text
    from determined_ds.protocol.run_dir import short

    path, note = keep(machine, run_dir)
    if as_json:
        click.echo(machine_text(machine), nl=False)
    else:
        click.echo("\n".join(["", *lines_of(machine), ""]))
    if note:
        click.echo(f"warning: {note}", err=True)
    click.echo(f"{short(run_dir)}: the figures and a picture; kept in {path}", err=True)
