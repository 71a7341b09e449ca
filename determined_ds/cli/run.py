"""``det-ds run``: run an experiment here, without a cluster."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from determined_ds.config.deepspeed_json import AUTO

EPILOG = """\b
Examples:
  det-ds run experiments/gpt2/const.yaml .
  det-ds run experiments/gpt2/zero3.yaml . --test
  det-ds run experiments/gpt2/const.yaml . --set hyperparameters.fit.max_length.batches=10
"""


class Slots(click.ParamType):
    """A number, or ``auto``."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return AUTO if value == AUTO else int(click.INT.convert(value, param, ctx))


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option(
    "--slots",
    type=Slots(),
    help="Ranks to start; resources.slots_per_trial if absent; auto: so many, or as many as this machine carries.",
)
@click.option(
    "--test", is_flag=True, help="One batch trained and validated, one checkpoint proved; then stop."
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<name>/<time>.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --run-dir.")
@click.option(
    "--storage",
    is_flag=True,
    help="Checkpoints go to the experiment's checkpoint_storage, and resume from there.",
)
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where there is any.")
@click.option(
    "--hang-timeout",
    metavar="MINUTES",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    help="End a run in which no step passes for so long; 0: never.",
)
@click.option("--measure", metavar="STEPS", type=click.IntRange(min=1), hidden=True)
@click.option("--warmup", metavar="STEPS", type=click.IntRange(min=0), default=5, hidden=True)
@click.option("--engine", type=click.Choice(["deepspeed", "ddp"]), default="deepspeed", hidden=True)
@click.option("--parent", metavar="PID", type=int, hidden=True)
def run(
    config: Path,
    context_dir: Path,
    slots: int | str | None,
    test: bool,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    storage: bool,
    accelerator: str | None,
    hang_timeout: float,
    measure: int | None,
    warmup: int,
    engine: str,
    parent: int | None,
) -> None:
    """Run the experiment CONFIG with the code in CONTEXT_DIR, here.

    The arguments are those of `det experiment create CONFIG CONTEXT_DIR`.
    """
    # The hidden options are for the commands that start many runs: compare, search, autotune.
    from determined_ds.doctor.before_ranks import freed_locks, missing_compiler
    from determined_ds.doctor.machine import Machine
    from determined_ds.errors import ConfigError
    from determined_ds.runtime.local_run import prepare_run
    from determined_ds.runtime.signals import end_with
    from determined_ds.runtime.terminal import outlive_readers

    if parent is not None:
        end_with(parent)
    outlive_readers()

    prepared = prepare_run(
        config,
        context_dir,
        slots=slots,
        overrides=overrides,
        run_dir=run_dir,
        resume=resume,
        accelerator=accelerator,
        now=datetime.now(),
        measured=measure is not None,
        storage=storage,
    )
    machine = Machine(working_dir=prepared.context_dir).with_variables(prepared.variables.values)
    builds = engine == "deepspeed"
    missing = missing_compiler(prepared.resolved, machine) if builds else []
    if missing:
        raise ConfigError(missing, prepared.warnings)
    for line in prepared.header():
        click.echo(line)
    # Whoever starts many runs has said once what is true of all of them.
    for warning in (
        *prepared.start.damages,
        *(prepared.warnings if parent is None else prepared.resolved.warnings),
    ):
        click.echo(f"warning: {warning}", err=True)
    for line in freed_locks(prepared.resolved, machine) if builds else ():
        click.echo(f"warning: {line}", err=True)
    if prepared.complete and not test and measure is None:
        click.echo(f"  complete   this run is complete: {prepared.complete}")
        return
    sys.stdout.flush()
    more = ["--engine", engine] if engine != "deepspeed" else []
    if measure is not None:
        more += ["--measure", str(measure), "--warmup", str(warmup)]
    sys.exit(prepared.launch(test=test, more=more, hang_timeout_s=60 * hang_timeout))
