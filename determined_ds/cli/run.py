"""``det-ds run``: run an experiment here, without a cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from determined_ds.cli.options import GivenPath
from determined_ds.errors import ConfigError, DeterminedDSError, Problem
from determined_ds.launch.options import RunOptions, click_options

OPTIONS = click_options()
EPILOG = """\b
Examples:
  det-ds run experiments/gpt2/const.yaml .
  det-ds run experiments/gpt2/zero3.yaml . --test
  det-ds run experiments/gpt2/const.yaml . --set hyperparameters.fit.max_length.batches=10
  det-ds run experiments/gpt2/const.yaml . --run-dir runs/gpt2 --resume best
"""


class _Run(click.Command):
    """Shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, options in OPTIONS.items():
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


@click.command(cls=_Run, epilog=EPILOG)
@click.argument("config", type=GivenPath())
@click.argument("context_dir", type=GivenPath(), default=".")
def run(**given: Any) -> None:
    """Run the experiment CONFIG with the code in CONTEXT_DIR, here.

    The arguments are those of `det experiment create CONFIG CONTEXT_DIR`. Its entrypoint is a trial class, in this
    library's form or Determined's own, or a script of Python, which finds here what a cluster gives it. Started by
    torchrun, srun, mpirun or deepspeed, the command is one of the ranks and starts none.
    """
    from determined_ds.launch.external import be_rank
    from determined_ds.launch.placement import placement_here
    from determined_ds.launch.prepare import prepare_run
    from determined_ds.rundir.handed_on import REPORT
    from determined_ds.rundir.signals import end_with, outlive_readers

    options = RunOptions(**given)
    if (options.resume or "").endswith((".yaml", ".yml", ".json")):
        about = {"message": "is no checkpoint", "fix": "write CONFIG and CONTEXT_DIR before --resume"}
        raise ConfigError(Problem(key="--resume", value=options.resume, **about))
    placed = None if options.parent is not None else placement_here()
    if placed is not None:
        be_rank(placed, options, train=_be_rank)
    if options.parent is not None:
        end_with(options.parent)
    outlive_readers()
    if options.report_to_master:
        if not os.environ.get("DET_MASTER"):
            raise click.UsageError("DET_MASTER is not set. fix: export DET_MASTER=https://HOST:PORT")
        os.environ[REPORT] = "1"
    with _result_for_parent(options):
        prepared = prepare_run(options)
        prepared.show()
        code = prepared.launch()
    sys.exit(code)


run.params += [option for options in OPTIONS.values() for option in options]


def _be_rank(words: list[str]) -> int:
    """Do what ``python3 -m WORDS`` does, in this process."""
    from determined_ds import script
    from determined_ds.train import __main__ as train

    module, *arguments = words
    return {"determined_ds.train": train.main, "determined_ds.script": script.main}[module](arguments)


@contextlib.contextmanager
def _result_for_parent(options: RunOptions) -> Iterator[None]:
    """Where a command reads ``result.json``, write it also for a run that could not be prepared or started."""
    try:
        yield
    except DeterminedDSError as error:
        if options.parent is not None and options.run_dir is not None:
            from determined_ds.rundir.handed_on import shortened
            from determined_ds.rundir.records import CONFIGURATION, ERROR, status_of, write_result
            from determined_ds.rundir.run_dir import RunDir

            cause = CONFIGURATION if isinstance(error, ConfigError) else ERROR
            status = status_of(error.exit_code)
            write_result(RunDir(options.run_dir), status=status, cause=cause, reason=shortened(str(error)))
        raise
