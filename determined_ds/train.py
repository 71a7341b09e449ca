"""The entrypoint of a rank, on a cluster and off it::

    python3 -m determined_ds.train MODULE:TRIAL

On a cluster Determined's launcher starts it and all else comes from the cluster. Off it ``det-ds run`` does,
with the run directory in ``--run-dir``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError, DeterminedDSError, EntrypointError, Problem
from determined_ds.runtime.run_dir import EXPERIMENT
from determined_ds.runtime.signals import die_with_parent, let_workers_end, stop_on_signal

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main(argv: list[str] | None = None) -> int:
    """Train one rank. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m determined_ds.train", description="Train one rank.")
    parser.add_argument("trial", metavar="MODULE:TRIAL", help="the trial class to train")
    parser.add_argument("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), help="the best there is, if absent")
    parser.add_argument("--test", action="store_true", help="one batch, one validation, one checkpoint")
    parser.add_argument("--resume", metavar="UUID", help="checkpoint to go on from")
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
    options = parser.parse_args(argv)
    if options.run_dir is not None:
        die_with_parent()
        stop_on_signal()
    try:
        try:
            _train(options)
        finally:
            let_workers_end()
    except DeterminedDSError as error:
        _say(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except (SystemExit, GeneratorExit):
        raise
    except BaseException:  # Determined's InvalidExperimentException is no Exception
        _say(traceback.format_exc(), 1)
        return 1
    return 0


def _train(options: argparse.Namespace) -> None:
    import determined as det

    from determined_ds.config.experiment import load_experiment
    from determined_ds.runtime.context import open_context
    from determined_ds.runtime.trainer import Trainer, fit_arguments

    info = det.get_cluster_info()
    on_cluster = info is not None and info.task_type == "TRIAL"
    experiment = None
    if not on_cluster:
        if options.run_dir is None:
            problem = Problem(
                key="determined_ds.train",
                message="runs on a cluster, or under `det-ds run`, and this is neither",
                mend="use: det-ds run CONFIG CONTEXT_DIR",
            )
            raise ConfigError(problem)
        experiment = load_experiment(options.run_dir / EXPERIMENT, name=EXPERIMENT)
    with open_context(
        experiment=experiment,
        run_dir=options.run_dir,
        accelerator=options.accelerator,
        engine=options.engine,
    ) as context:
        is_pipeline = context.resolved.topology.pipe_parallel_size > 1
        spec = options.pipeline_trial if options.pipeline_trial and is_pipeline else options.trial
        trial = load_trial(spec)(context)
        if options.measure is not None:
            _measure(trial, context, options)
            return
        Trainer(trial, context).fit(
            **fit_arguments(context.resolved.fit),
            latest_checkpoint=(info.latest_checkpoint or None) if on_cluster and info else options.resume,
            test_mode=options.test,
        )


def _measure(trial: Any, context: Any, options: argparse.Namespace) -> None:
    from determined_ds.report.results import write_row
    from determined_ds.runtime.measured_loop import measure_throughput
    from determined_ds.runtime.run_dir import MEASURED
    from determined_ds.runtime.trainer import fit_arguments

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
    """
    from determined.pytorch import deepspeed as det_ds

    module_name, _, class_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # a module that the trial imports is missing: its traceback says where
        mend = "check the path in the entrypoint"
        raise _entrypoint(spec, f"there is no module {error.name}", mend) from None
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
    return trial


def _entrypoint(spec: str, message: str, mend: str) -> EntrypointError:
    problem = Problem(key="entrypoint", value=spec, message=message, mend=mend, code="entrypoint")
    return EntrypointError(problem)


def _say(message: str, exit_code: int) -> None:
    """Tell the launcher why this rank ends, in torch's form; without a launcher of ours, tell stderr."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(message, file=sys.stderr, flush=True)
        return
    now = time.time()
    extra = {"timestamp": str(int(now)), "precise_timestamp": now, "exit_code": exit_code}
    with open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process group may wait for a peer that is gone; nothing of ours is left to do.
    os._exit(code)
