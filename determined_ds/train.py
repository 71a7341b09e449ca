"""The entrypoint of a rank, on a cluster and off it::

    python3 -m determined_ds.train MODULE:TRIAL

On a cluster Determined's launcher starts it. Off it ``det-ds run`` does, with the run directory in ``--run-dir``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from determined_ds.errors import (
    EXIT_TRAINING_FAILED,
    ConfigError,
    DeterminedDSError,
    EntrypointError,
    Problem,
    TrialError,
)
from determined_ds.protocol.conclusion import ERROR, EXHAUSTED
from determined_ds.protocol.exhausted import exhausted, leave_reporting_to_main_thread
from determined_ds.protocol.handed_on import LAUNCHED_BY, PARENT, copy_to_terminal, report_failure
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.run_dir import EXPERIMENT, RunDir
from determined_ds.protocol.signals import die_with_parent, end_with, let_workers_end, stop_on_signal
from determined_ds.protocol.terminal import outlive_readers
from determined_ds.runtime.master.ending import (
    came_of_other_ranks,
    cause_of,
    exit_code_of,
    on_cluster,
    reason_of,
    said_by_chief,
    say_in_task_log,
)
from determined_ds.runtime.tracebacks import AuthorsFiles, exit_of_author, os_exit_reported, trimmed_traceback


def main(argv: list[str] | None = None) -> int:
    """Train one rank. Returns the exit code."""
    options = _parser().parse_args(argv)
    if options.run_dir is not None:
        _listen_to_launcher(RunDir(options.run_dir))
    files = AuthorsFiles(os.getcwd())
    try:
        try:
            with os_exit_reported(files, _report_exit):
                _train(options)
        finally:
            let_workers_end()
    except KeyboardInterrupt:
        return 130
    except GeneratorExit:
        raise
    except SystemExit as error:
        message = exit_of_author(error, files)
        if message is None:
            raise
        _report_exit(message, EXIT_TRAINING_FAILED)
        return EXIT_TRAINING_FAILED
    except BaseException as error:  # Determined's InvalidExperimentException is not an Exception
        return _failed(error, files, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m determined_ds.train", description="Train one rank.")
    add = parser.add_argument
    add("trial", metavar="MODULE:TRIAL", help="the trial class to train")
    add("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    add("--accelerator", choices=("cpu", "cuda"), help="default: CUDA if available")
    add("--test", action="store_true", help="one batch, one validation, one checkpoint")
    add("--resume", metavar="UUID", help="checkpoint to resume from")
    add("--fork", metavar="DIR", help="checkpoint of another run, to start with its weights")
    pipeline = "the trial to train instead where pipe_parallel_size is above 1"
    add("--pipeline-trial", metavar="MODULE:TRIAL", help=pipeline)
    add(
        "--measure", metavar="STEPS", type=int, help="measure this many steps, instead of training to the end"
    )
    add("--warmup", metavar="STEPS", type=int, default=5, help="steps before those measured")
    add("--engine", choices=("deepspeed", "ddp"), default="deepspeed", help="what trains")
    add("--storage", action="store_true", help="checkpoints go to checkpoint_storage")
    return parser


def _listen_to_launcher(run_dir: RunDir) -> None:
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))
    else:
        die_with_parent()
    stop_on_signal()
    outlive_readers()
    leave_reporting_to_main_thread(run_dir.path)
    HEART.listen_for_questions(run_dir.log(_rank()))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


# ------------------------------------------------------------------------------------------- training


def _train(options: argparse.Namespace) -> None:
    import determined as det

    from determined_ds.experiment.experiment import load_experiment
    from determined_ds.protocol.header import decided
    from determined_ds.runtime.upstream import log_in_task

    info = det.get_cluster_info()
    if info is not None and info.task_type != "TRIAL":
        info = None
    experiment = None
    if info is None:
        if options.run_dir is None:
            message = "must be started by a cluster, or by `det-ds run`"
            fix = "use: det-ds run CONFIG CONTEXT_DIR"
            raise ConfigError(Problem(key="determined_ds.train", message=message, fix=fix))
        there = RunDir(options.run_dir)
        experiment = load_experiment(there.current(there.experiment), name=EXPERIMENT)
    config = experiment.config if experiment is not None else info.trial._config if info is not None else {}
    options.debug = bool(config.get("debug"))
    if info is not None and not options.debug:
        log_in_task(options.accelerator)

    from determined_ds.runtime.context import open_context
    from determined_ds.runtime.loop.fit import Trainer, fit_arguments
    from determined_ds.runtime.upstream import debugging

    with (
        debugging(options.debug),
        open_context(
            experiment=experiment,
            run_dir=options.run_dir,
            accelerator=options.accelerator,
            engine=options.engine,
            storage=options.storage,
        ) as context,
    ):
        is_pipeline = context.resolved.topology.pipe_parallel_size > 1
        spec = options.pipeline_trial if options.pipeline_trial and is_pipeline else options.trial
        if info is not None and context.distributed.rank == 0:
            print(*decided(config["name"], spec, context.resolved), sep="\n", flush=True)
        trial = load_trial(spec)(context)
        if options.measure is not None:
            _measure(trial, context, options)
            return
        Trainer(trial, context).fit(
            **fit_arguments(context.resolved.fit),
            latest_checkpoint=options.resume if info is None else info.latest_checkpoint or None,
            test_mode=options.test,
            fork=options.fork,
        )


def _measure(trial: Any, context: Any, options: argparse.Namespace) -> None:
    from determined_ds.report.results import write_row
    from determined_ds.runtime.loop.fit import fit_arguments
    from determined_ds.runtime.loop.measured_loop import measure_throughput

    period = fit_arguments(context.resolved.fit)["validation_period"]
    row = measure_throughput(
        trial, context, steps=options.measure, warmup=options.warmup, validation_period=period
    )
    if options.run_dir is not None and context.distributed.rank == 0:
        write_row(row, RunDir(options.run_dir).measured)


def load_trial(spec: str) -> Any:
    """Import ``MODULE:CLASS``.

    Raises:
        EntrypointError: there is no such module or class, or it does not subclass ``DeepSpeedTrial``.
        TrialError: it lacks a method.
    """
    from determined.pytorch import deepspeed as det_ds

    def problem(message: str, fix: str) -> EntrypointError:
        return EntrypointError(
            Problem(key="entrypoint", value=spec, message=message, fix=fix, code="entrypoint")
        )

    module_name, _, class_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # a module that the trial imports is missing: its traceback says where
        raise problem(f"there is no module {error.name}", "check the path in the entrypoint") from None
    trial = getattr(module, class_name, None)
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    classes = [
        name
        for name, value in found.items()
        if issubclass(value, det_ds.DeepSpeedTrial) and value.__module__ == module.__name__
    ]
    there = f"use one of its trials: {', '.join(classes)}" if classes else "subclass DataParallelTrial in it"
    if trial is None:
        raise problem(f"module {module_name} has no {class_name}", there)
    if not (isinstance(trial, type) and issubclass(trial, det_ds.DeepSpeedTrial)):
        raise problem(f"{class_name} must be a subclass of DeepSpeedTrial", there)
    missing = sorted(getattr(trial, "__abstractmethods__", ()))
    if missing:
        message = f"does not define {', '.join(missing)}"
        fix = "define it in the class, or in one that it derives from"
        raise TrialError(Problem(key=class_name, origin=spec, message=message, fix=fix, code="abstract"))
    return trial


# ------------------------------------------------------------------------------------------- failures


def _failed(error: BaseException, files: AuthorsFiles, options: argparse.Namespace) -> int:
    """Report why this rank ends. Returns its exit code."""
    run_dir = None if options.run_dir is None else RunDir(options.run_dir)
    used_up = None if run_dir is None else exhausted(error, run_dir.path)
    if used_up:  # first: it may look like an error of the trial
        _report(used_up, EXIT_TRAINING_FAILED, EXHAUSTED, used_up)
        return EXIT_TRAINING_FAILED
    if isinstance(error, DeterminedDSError):
        message = str(error) if isinstance(error, ConfigError) else f"error: {error}"
    elif getattr(options, "debug", False):
        message = "".join(traceback.format_exception(error))
    else:  # from the author's first line on
        message = trimmed_traceback(error, files, None if run_dir is None else run_dir.traceback(_rank()))
    code = exit_code_of(error)
    _report(message, code, cause_of(error), reason_of(error), error)
    return code


def _report_exit(message: str, exit_code: int) -> None:
    _report(message, exit_code, ERROR, message)


def _report(
    message: str, exit_code: int, cause: str, reason: str, error: BaseException | None = None
) -> None:
    """Report why this rank ends: to our launcher, in the task's log on a cluster, or else on stderr."""
    # Errors of destructors say nothing new.
    sys.unraisablehook = lambda _: None
    peers = sys.modules.get("determined_ds.runtime.group.peers")
    if error is not None and peers is not None and came_of_other_ranks(error):
        peers.say_missing_peers()
    if report_failure(message, exit_code, cause=cause, reason=reason):
        return
    if on_cluster():
        say_in_task_log(message, exit_code, error)
    else:
        print(message, file=sys.stderr, flush=True)
        if LAUNCHED_BY in os.environ and not said_by_chief(message):
            copy_to_terminal(message)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process group may wait for a peer that is gone.
    os._exit(code)
