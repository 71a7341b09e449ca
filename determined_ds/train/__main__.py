"""The entrypoint of a rank, on a cluster and off it::

    python3 -m determined_ds.train MODULE:TRIAL

On a cluster Determined's launcher starts it. Off it ``det-ds run`` does, with the run directory in ``--run-dir``.
"""

from __future__ import annotations

import argparse
import os
import sys

from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.signals import survived_by_parent
from determined_ds.train.rank import RankProcess, Run, begin, end_process, here, rank_parser


def main(argv: list[str] | None = None) -> int:
    """Train one rank. Returns the exit code."""
    parser = rank_parser("determined_ds.train", "Train one rank.")
    add = parser.add_argument
    add("trial", metavar="MODULE:TRIAL", help="the trial class to train")
    add("--engine", choices=("deepspeed", "ddp"), default="deepspeed", help="what trains")
    add("--evaluate", metavar="CHECKPOINT", help="validate its weights once; its uuid, on a cluster")
    options = parser.parse_args(argv)
    return RankProcess(options.run_dir).run(lambda: _train(options))


def _train(options: argparse.Namespace) -> None:
    if options.run_dir is not None:
        begin(Run.of(options))
    found = here()
    if found is None:
        message = "must be started by a cluster, or by `det-ds run`"
        fix = "use: det-ds run CONFIG CONTEXT_DIR"
        raise ConfigError(Problem(key="determined_ds.train", message=message, fix=fix))
    run, config = found.run, found.exp_conf or {}
    if config.get("debug"):
        from determined import common

        common.set_logger(True)
    elif found.on_cluster:
        from determined_ds.train.group.process_group import log_in_task

        log_in_task(options.accelerator)

    from determined_ds.config.params import FitOptions, parse_hyperparameters
    from determined_ds.train.bare_trial import trial_class
    from determined_ds.train.loop.trainer import Trainer, of_hyperparameters
    from determined_ds.train.opening import open_context

    trains = options.measure is None and options.evaluate is None
    with open_context(accelerator=options.accelerator, engine=options.engine, trains=trains) as context:
        is_chief = context.distributed.rank == 0
        if found.on_cluster and is_chief:
            from determined_ds.report.header import decided

            resolved, runs = context.resolved, options.trial
            lines = decided(config["name"], runs, resolved, resolved.topology.slots, resolved.accelerator)
            print(*lines, sep="\n", flush=True)
        # The engine of a legacy trial may decide all but the length.
        is_open = run is not None and run.experiment.entrypoint.is_legacy
        # The peak is measured before engines take the GPU, where the precision is known by then.
        if not is_open and (options.profile or context.resolved.fit.profile is not None):
            from determined_ds.profile.mfu import peak_flops

            peak_flops(context.device, context.resolved.strategy.precision)
        sys.path.insert(0, os.getcwd())
        trial = trial_class(options.trial)(context)
        if options.measure is not None:
            from determined_ds.report.results import write_row
            from determined_ds.train.loop.measure import measure_throughput

            length = {"steps": options.measure, "warmup": options.warmup, "profiles": options.profile}
            row = measure_throughput(trial, context, **length)
            if run is not None and is_chief:
                write_row(row, run.there.measured)
        elif options.evaluate is not None:
            Trainer(trial, context).prepare(FitOptions(checkpoint_policy="none")).evaluate(options.evaluate)
        else:
            fit = parse_hyperparameters(found.hyperparameters).fit if is_open else context.resolved.fit
            training = Trainer(trial, context).prepare(of_hyperparameters(fit), test_mode=options.test)
            training.train(found.latest_checkpoint, options.fork)


if __name__ == "__main__":
    if os.environ.get("DET_TASK_TYPE") == "TRIAL":
        survived_by_parent()
    end_process(main())
