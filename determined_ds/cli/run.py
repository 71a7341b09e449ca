"""``det-ds run``: run an experiment here, without a cluster."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.config.deepspeed.normalized import AUTO
from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.handed_on import HANG_TIMEOUT, HANG_TIMEOUT_MINUTES, REPORT

if TYPE_CHECKING:
    from determined_ds.launch.prepare import LocalRun

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
    help="End a run in which no step passes for so long; 0: never. Default: "
    f"{HANG_TIMEOUT} of the experiment or the shell, or {HANG_TIMEOUT_MINUTES:g}.",
)
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    help="Machines (HOST slots=N, a line each) on which DeepSpeed's launcher starts the ranks, by pdsh over ssh.",
)
@click.option(
    "--report-to-master",
    is_flag=True,
    help="Show the run in the web UI of the master that DET_MASTER names, as an unmanaged experiment.",
)
@click.option("--measure", metavar="STEPS", type=click.IntRange(min=1), hidden=True)
@click.option("--warmup", metavar="STEPS", type=click.IntRange(min=0), default=5, hidden=True)
@click.option("--engine", type=click.Choice(["deepspeed", "ddp"]), default="deepspeed", hidden=True)
@click.option("--parent", metavar="PID", type=int, hidden=True)
@click.option("--local-rank", type=int, hidden=True)  # deepspeed's launcher adds it
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
    hang_timeout: float | None,
    hostfile: Path | None,
    report_to_master: bool,
    measure: int | None,
    warmup: int,
    engine: str,
    parent: int | None,
    local_rank: int | None,
) -> None:
    """Run the experiment CONFIG with the code in CONTEXT_DIR, here.

    The arguments are those of `det experiment create CONFIG CONTEXT_DIR`. Started by torchrun, srun, mpirun or
    deepspeed, it is one of the ranks and starts none.
    """
    # The hidden options are for the commands that start many runs: compare, search, autotune.
    from determined_ds import train
    from determined_ds.launch.asked import Asked
    from determined_ds.launch.elsewhere.as_rank import be_rank
    from determined_ds.launch.elsewhere.hostfile import run_on_hosts
    from determined_ds.launch.elsewhere.placement import placement_here
    from determined_ds.launch.prepare import prepare_run
    from determined_ds.protocol.signals import end_with
    from determined_ds.protocol.terminal import outlive_readers

    more = ["--engine", engine] if engine != "deepspeed" else []
    if measure is not None:
        more += ["--measure", str(measure), "--warmup", str(warmup)]
    asked = Asked(
        config=config,
        context_dir=context_dir,
        slots=slots,
        overrides=overrides,
        run_dir=run_dir,
        resume=resume,
        accelerator=accelerator,
        storage=storage,
        test=test,
        hang_timeout=hang_timeout,
        measured=measure is not None,
        more=more,
    )
    placed = None if parent is not None else placement_here()
    if placed is not None:
        be_rank(placed, asked, before_ranks=partial(_before_ranks, engine=engine), train=train.main)
    if hostfile is not None:
        run_on_hosts(hostfile, asked)
    if parent is not None:
        end_with(parent)
    outlive_readers()
    if report_to_master:
        _report_to_master()

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
    found = _before_ranks(prepared, engine=engine)
    for line in prepared.header():
        click.echo(line)
    # Whoever starts many runs has said once what is true of all of them.
    for warning in (
        *prepared.start.damages,
        *(prepared.warnings if parent is None else prepared.resolved.warnings),
    ):
        click.echo(f"warning: {warning}", err=True)
    for warned in found:
        click.echo(f"warning: {warned}", err=True)
    if prepared.complete and not test and measure is None:
        click.echo(f"  complete   this run is complete: {prepared.complete}")
        return
    sys.stdout.flush()
    hang_timeout_s = None if hang_timeout is None else 60 * hang_timeout
    sys.exit(prepared.launch(test=test, more=more, hang_timeout_s=hang_timeout_s))


def _before_ranks(prepared: LocalRun, *, engine: str) -> list[str]:
    """Look whether this machine can build what DeepSpeed will, before a rank tries. Returns warnings.

    Raises:
        ConfigError: a compiler is missing.
    """
    from determined_ds.doctor.before_ranks import freed_locks, missing_compiler
    from determined_ds.doctor.machine import Machine

    if engine != "deepspeed":
        return []
    machine = Machine(working_dir=prepared.context_dir).with_variables(prepared.variables.values)
    missing = missing_compiler(prepared.resolved, machine)
    if missing:
        raise ConfigError(missing, prepared.warnings)
    return [str(line) for line in freed_locks(prepared.resolved, machine)]


def _report_to_master() -> None:
    """Have rank 0 report the run.

    Raises:
        ConfigError: no master is named.
    """
    if not os.environ.get("DET_MASTER"):
        message, fix = "the environment names no master", "export DET_MASTER=https://HOST:PORT"
        raise ConfigError(Problem(key="--report-to-master", message=message, fix=fix, code="master"))
    os.environ[REPORT] = "1"
