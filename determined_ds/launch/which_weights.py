"""``--evaluate`` and ``--predict``: which checkpoint, where its results go, and what such a run cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from determined_ds.checkpoints.files import Checkpoint, checkpoints_in
from determined_ds.checkpoints.named import FORM, NotFound, best_checkpoint, find
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.launch.options import RunOptions
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.run_dir import RunDir, short


def check_options(
    options: RunOptions, experiment: Experiment, resolved: ResolvedConfig | None
) -> Iterator[Problem]:
    """What is wrong with ``--evaluate``, ``--predict`` and what stands beside them."""
    flag = _flag(options)
    if options.checkpoint is not None and options.predict is None:
        yield Problem(
            key="--checkpoint", message="is for --predict", fix="add --predict FILE", code="predict"
        )
    if not options.only_reads:
        return
    names = ("test", "resume", "report_to_master", "is_measured")
    beside = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    beside += ["--predict"] if options.evaluate is not None and options.predict is not None else []
    if beside:
        message = f"cannot be given together with {', '.join(beside)}"
        yield Problem(key=flag, message=message, fix="leave one of them out", code="evaluate")
    if experiment.script is not None:
        message, fix = "runs trials, and this experiment runs a script", "have the script load its checkpoint"
        yield Problem(key=flag, message=message, fix=fix, code="evaluate")
    if options.predict is not None:
        yield from _check_file(options.predict)
        if resolved is not None and resolved.topology.pipe_parallel_size > 1:
            message = "the stages of a pipeline compute a loss, and hand no outputs on"
            fix = "set pipe_parallel_size to 1, with a trial without stages; or use load_model_from_checkpoint_path"
            yield Problem(key=flag, message=message, fix=fix, code="predict")


def _flag(options: RunOptions) -> str:
    return "--predict" if options.predict is not None else "--evaluate"


def _check_file(file: Path) -> Iterator[Problem]:
    message, fix = "", ""
    if file.suffix != ".jsonl":
        message, fix = "must end in .jsonl", f"write e.g. {file.stem or 'predictions'}.jsonl"
    elif not file.absolute().parent.is_dir():
        message, fix = "its folder does not exist", f"make it: mkdir -p {short(file.absolute().parent)}"
    if message:
        yield Problem(key="--predict", value=str(file), message=message, fix=fix, code="predict")


def weights_to_read(options: RunOptions) -> Checkpoint:
    """The checkpoint that ``--evaluate`` or ``--checkpoint`` names.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    given = options.evaluate if options.evaluate is not None else options.checkpoint
    run = None if options.run_dir is None else RunDir(options.run_dir)
    flag = "--evaluate" if options.evaluate is not None else "--checkpoint"
    if given is None:
        if run is None or not checkpoints_in(run.checkpoints):
            message = "needs the weights of a checkpoint"
            fix = "add --checkpoint PATH, or --run-dir of a run that has checkpoints: its best is taken"
            raise ConfigError(Problem(key="--predict", message=message, fix=fix, code="predict"))
        given = BEST if best_checkpoint(run) is not None else LAST
    try:
        return find(given, run).checkpoint
    except NotFound as error:
        problem = Problem(key=flag, value=given, message=str(error), fix=FORM, code="evaluate")
        raise ConfigError(problem) from None


def folder_of_results(run_dir: Path, options: RunOptions, checkpoint: Checkpoint) -> Path:
    """The run directory, or a folder in it where it is that of a training, which stays as it is."""
    if not checkpoints_in(RunDir(run_dir).checkpoints):
        return run_dir
    return run_dir / ("predicted" if options.predict is not None else "evaluated") / checkpoint.uuid
