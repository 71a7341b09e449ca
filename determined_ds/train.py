"""The entrypoint of a rank, on a cluster and off it::

    python3 -m determined_ds.train MODULE:TRIAL

On a cluster Determined's launcher starts it and all else comes from the cluster. Off it ``det-ds run`` does,
with the run directory in ``--run-dir``.
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
from determined_ds.protocol.exhausted import exhausted, let_main_thread_tell
from determined_ds.protocol.handed_on import LAUNCHED_BY, PARENT, tell_launcher, tell_terminal
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.laid_aside import current
from determined_ds.protocol.run_dir import EXPERIMENT, LOGS
from determined_ds.protocol.signals import (
    die_with_parent,
    end_with,
    let_workers_end,
    stop_on_signal,
)
from determined_ds.protocol.terminal import outlive_readers
from determined_ds.runtime.authors_frames import (
    AuthorsFiles,
    exit_of_author,
    os_exit_told,
    told_from_author,
)
from determined_ds.runtime.master.ending import (
    came_of_other_ranks,
    exit_code_of,
    on_cluster,
    said_by_chief,
    say_in_task_log,
)


def main(argv: list[str] | None = None) -> int:
    """Train one rank. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m determined_ds.train", description="Train one rank.")
    parser.add_argument("trial", metavar="MODULE:TRIAL", help="the trial class to train")
    parser.add_argument("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), help="the best there is, if absent")
    parser.add_argument("--test", action="store_true", help="one batch, one validation, one checkpoint")
    parser.add_argument("--resume", metavar="UUID", help="checkpoint to go on from")
    parser.add_argument("--fork", metavar="DIR", help="checkpoint of another run, to begin with its weights")
    parser.add_argument(
        "--pipeline-trial",
        metavar="MODULE:TRIAL",
        help="the trial to train instead where pipe_parallel_size is above 1",
    )
    parser.add_argument(
        "--measure", metavar="STEPS", type=int, help="measure so many steps, instead of training to the end"
    )
    parser.add_argument("--warmup", metavar="STEPS", type=int, default=5, help="steps before those measured")
    parser.add_argument("--engine", choices=("deepspeed", "ddp"), default="deepspeed", help="what trains")
    parser.add_argument("--storage", action="store_true", help="checkpoints go to checkpoint_storage")
    options = parser.parse_args(argv)
    if options.run_dir is not None:
        if PARENT in os.environ:
            end_with(int(os.environ[PARENT]))
        else:
            die_with_parent()
        stop_on_signal()
        outlive_readers()
        let_main_thread_tell(options.run_dir)
        HEART.listen_for_questions(options.run_dir / LOGS / f"rank{os.environ.get('RANK', '0')}.log")
    files = AuthorsFiles(os.getcwd())
    try:
        try:
            with os_exit_told(files, _say):
                _train(options)
        finally:
            let_workers_end()
    except DeterminedDSError as error:
        if used_up := _used_up(error, options):  # which may look as if the trial had done it
            _say(used_up, EXIT_TRAINING_FAILED)
            return EXIT_TRAINING_FAILED
        code = exit_code_of(error)
        _say(str(error) if isinstance(error, ConfigError) else f"error: {error}", code, error)
        return code
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        message = exit_of_author(error, files)
        if message is None:
            raise
        _say(message, 1)
        return 1
    except GeneratorExit:
        raise
    except BaseException as error:  # Determined's InvalidExperimentException is no Exception
        used_up = _used_up(error, options)
        code = EXIT_TRAINING_FAILED if used_up else exit_code_of(error)
        _say(used_up or _traceback(error, files, options), code, error)
        return code
    return 0


def _traceback(error: BaseException, files: AuthorsFiles, options: argparse.Namespace) -> str:
    """From the author's first line on; all of it where the experiment says ``debug: true``."""
    if getattr(options, "debug", False):
        return "".join(traceback.format_exception(error))
    rank = os.environ.get("RANK", "0")
    keep = None if options.run_dir is None else options.run_dir / LOGS / f"traceback-rank{rank}.txt"
    return told_from_author(error, files, keep)


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
            problem = Problem(
                key="determined_ds.train",
                message="runs on a cluster, or under `det-ds run`, and this is neither",
                fix="use: det-ds run CONFIG CONTEXT_DIR",
            )
            raise ConfigError(problem)
        experiment = load_experiment(current(options.run_dir, EXPERIMENT), name=EXPERIMENT)
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
    from determined_ds.protocol.run_dir import MEASURED
    from determined_ds.report.measurements import write_row
    from determined_ds.runtime.loop.fit import fit_arguments
    from determined_ds.runtime.loop.measured_loop import measure_throughput

    period = fit_arguments(context.resolved.fit)["validation_period"]
    row = measure_throughput(
        trial, context, steps=options.measure, warmup=options.warmup, validation_period=period
    )
    if options.run_dir is not None and context.distributed.rank == 0:
        write_row(row, options.run_dir / MEASURED)


def load_trial(spec: str) -> Any:
    """Import ``MODULE:CLASS``.

    Raises:
        EntrypointError: there is no such module or class, or it is no ``DeepSpeedTrial``.
        TrialError: it lacks a method.
    """
    from determined.pytorch import deepspeed as det_ds

    module_name, _, class_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # a module that the trial imports is missing: its traceback says where
        fix = "check the path in the entrypoint"
        raise _entrypoint(spec, f"there is no module {error.name}", fix) from None
    trial = getattr(module, class_name, None)
    classes = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, det_ds.DeepSpeedTrial)
        and value.__module__ == module.__name__
    ]
    there = f"use one of its trials: {', '.join(classes)}" if classes else "subclass DataParallelTrial in it"
    if trial is None:
        raise _entrypoint(spec, f"module {module_name} has no {class_name}", there)
    if not (isinstance(trial, type) and issubclass(trial, det_ds.DeepSpeedTrial)):
        raise _entrypoint(spec, f"{class_name} is no DeepSpeedTrial", there)
    missing = sorted(getattr(trial, "__abstractmethods__", ()))
    if missing:
        message, fix = (
            f"does not define {', '.join(missing)}",
            "define it in the class, or in one that it derives from",
        )
        raise TrialError(Problem(key=class_name, origin=spec, message=message, fix=fix, code="abstract"))
    return trial


def _entrypoint(spec: str, message: str, fix: str) -> EntrypointError:
    problem = Problem(key="entrypoint", value=spec, message=message, fix=fix, code="entrypoint")
    return EntrypointError(problem)


def _used_up(error: BaseException, options: argparse.Namespace) -> str | None:
    return None if options.run_dir is None else exhausted(error, options.run_dir)


def _say(message: str, exit_code: int, error: BaseException | None = None) -> None:
    """Say why this rank ends: to our launcher, in the log of a cluster's task, or else on stderr."""
    # What its objects do not manage while they are deleted is no news.
    sys.unraisablehook = lambda _: None
    if (
        error is not None
        and came_of_other_ranks(error)
        and "determined_ds.runtime.group.peers" in sys.modules
    ):
        sys.modules["determined_ds.runtime.group.peers"].say_missing_peers()
    if tell_launcher(message, exit_code):
        return
    if on_cluster():
        say_in_task_log(message, exit_code, error)
    else:
        print(message, file=sys.stderr, flush=True)
        if LAUNCHED_BY in os.environ and not said_by_chief(message):
            tell_terminal(message)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process group may wait for a peer that is gone; nothing of ours is left to do.
    os._exit(code)
