"""Measurements by runs of an experiment: steps at several points of it, and what its checkpoints cost.

Each run is a ``det-ds run`` in processes of its own, decided and checked before the first starts. Where no experiment
is given, checkpoints are measured of one of ours.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

import determined_ds
from determined_ds.bench.plan import BenchPlace
from determined_ds.config.create import create_deepspeed_config
from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.protocol.machine_figures import TimedStep
from determined_ds.protocol.machine_file import NAME, MachineFigures, read_machine
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.results import Row, read_row

POLL_S = 0.25
WARMUP = 3
TRIAL = "determined_ds.runtime.benching.bench_trial:BenchTrial"
LAUNCHER = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train"
CODE = Path(determined_ds.__file__).parents[1]  # the folder that holds TRIAL
PROGRESS = "  turn "  # how lines of progress begin in the output of a run
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredExperiment:
    """The experiment that is measured.

    Args:
        config: Its YAML.
        context_dir: The folder with its code.
        overrides: ``KEY=VALUE``, as ``--set``.
    """

    config: Path
    context_dir: Path
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BenchPoint:
    """A run that will be measured.

    Args:
        name: What differs from the other points; "" where there is one alone.
        run: The run, decided.
    """

    name: str
    run: LocalRun


def own_experiment(place: BenchPlace, *, model: str, zero_stage: int) -> MeasuredExperiment:
    """The experiment of a transformer on random tokens, written to the run directory.

    Args:
        place: Its slots and the run directory.
        model: ``LAYERSxWIDTH``.
        zero_stage: 0 to 3.
    """
    experiment = {
        "name": f"bench_{model}",
        "entrypoint": f"{LAUNCHER} {TRIAL}",
        "resources": {"slots_per_trial": place.slots},
        "searcher": {"name": "single", "metric": "validation_loss"},
        "hyperparameters": {
            "global_batch_size": place.slots,
            "learning_rate": 1e-4,
            "warmup_num_steps": 1,
            "model": model,
            "fit": {"max_length": {"batches": 1}},
            "deepspeed_config": {"type": "const", "val": create_deepspeed_config(zero_stage=zero_stage)},
        },
    }
    config = place.run_dir / "experiment.yaml"
    write_files({config: yaml.safe_dump(experiment, sort_keys=False)}, overwrite=True)
    return MeasuredExperiment(config=config, context_dir=CODE)


def points_of(
    given: MeasuredExperiment, place: BenchPlace, vary: Sequence[str], **options: Any
) -> list[BenchPoint]:
    """The points of an experiment, all of them decided.

    Args:
        given: The experiment.
        place: Where its runs write, and on how many slots.
        vary: ``KEY=VALUE,VALUE,...``; a point for each combination.
        options: More of :class:`~determined_ds.launch.options.RunOptions`.

    Raises:
        ConfigError: a point cannot run.
    """
    points = []
    for index, chosen in enumerate(itertools.product(*(_values(each) for each in vary))):
        run = prepare_run(
            RunOptions(
                config=given.config,
                context_dir=given.context_dir,
                slots=place.slots,
                overrides=(*given.overrides, *chosen),
                run_dir=place.run_dir / "runs" / str(index + 1),
                accelerator=place.accelerator.name,
                **options,
            )
        )
        points.append(BenchPoint(name=", ".join(each.rpartition(".")[2] for each in chosen), run=run))
    return points


def _values(vary: str) -> list[str]:
    key, equals, values = vary.partition("=")
    found = [f"{key.strip()}={value.strip()}" for value in values.split(",") if value.strip()]
    if not equals or not key.strip() or not found:
        message, fix = "must be KEY=VALUE,VALUE,...", "e.g. hyperparameters.global_batch_size=8,16,32"
        raise ConfigError(Problem(key="--vary", value=vary, message=message, fix=fix, code="vary"))
    return found


def timed_steps(
    points: Sequence[BenchPoint], steps: int, seconds: float, say: Say
) -> tuple[list[TimedStep], list[str]]:
    """Run the points one after the other, as long as there is time.

    Returns:
        What was measured, and why some points were not.

    Raises:
        KeyboardInterrupt: the user has ended it.
    """
    until, found, notes = time.monotonic() + seconds, [], []
    for index, point in enumerate(points):
        name = point.name or point.run.experiment.name
        if index and time.monotonic() > until:
            notes.append(f"no time was left for {'; '.join(each.name for each in points[index:])}")
            break
        arguments = ["--measure", str(steps), "--warmup", str(WARMUP)]
        process = _ended(point.run, arguments, say)
        if process.poll():
            notes.append(f"{name}: {process.result().reason}")
        else:
            found.append(_step(point, read_row(RunDir(process.run_dir).measured)))
            say(f"{name}: {1000 * found[-1].step_seconds:,.0f} ms a step")
    return found, notes


def timed_checkpoints(point: BenchPoint, seconds: float, say: Say) -> MachineFigures:
    """Write and read the checkpoints of a run.

    Raises:
        TrainingError: it has failed.
        KeyboardInterrupt: the user has ended it.
    """
    storage = ["--storage"] if point.run.options.storage else []
    process = _ended(point.run, ["--time-checkpoints", str(seconds), *storage], say)
    if process.poll():
        raise TrainingError(f"{process.result().reason}; its output is {RunDir(process.run_dir).output}")
    return read_machine(process.run_dir / NAME)


def _ended(run: LocalRun, arguments: list[str], say: Say) -> TrialProcess:
    """A run, at its end."""
    process = TrialProcess(
        experiment=run.experiment.document,
        context_dir=run.context_dir,
        run_dir=run.run_dir,
        accelerator=run.accelerator.name,
        arguments=arguments,
    )
    shown = 0
    with Interrupts("ending the measurement; nothing of it is kept") as interrupts:
        process.start()
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if interrupts.requested:
                    raise KeyboardInterrupt
                lines = [line for line in process.output().splitlines() if line.startswith(PROGRESS)]
                for line in lines[shown:]:
                    say(line.strip())
                shown = len(lines)
        finally:
            process.kill()
    return process


def _step(point: BenchPoint, row: Row) -> TimedStep:
    """What a run has measured."""
    seconds = [each for repetition in row.repetitions for each in repetition.step_seconds]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else 3 * seconds
    tokens, parameters = row.tokens_per_sample or 0, _parameters(point.run)
    samples = row.samples_per_step or 1
    name = point.run.experiment.name
    return TimedStep(
        model=f"{name}: {point.name}" if point.name else name,
        num_parameters=parameters,
        strategy="pipeline" if row.is_pipeline else f"zero{row.zero_stage or 0}",
        precision=row.precision or "fp32",
        ranks=row.slots,
        micro_batch_size=row.micro_batch_size or 1,
        samples=samples,
        tokens_per_sample=tokens,
        step_seconds=median,
        fast_step_seconds=low,
        slow_step_seconds=high,
        flops=6.0 * parameters * tokens * samples if parameters and tokens else None,
    )


def _parameters(run: LocalRun) -> int | None:
    """Of the model; None where it cannot be built without weights, as that of a script."""
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    if run.resolved is None:
        return None
    try:
        return shape_of_experiment(run.experiment, run.resolved, run.context_dir).num_parameters
    except ConfigError:
        return None


def with_steps(peaks: MachineFigures, steps: Sequence[TimedStep], notes: Sequence[str]) -> MachineFigures:
    """The peaks of a machine, and the steps that were timed beside them."""
    [signed] = peaks.measured
    return replace(peaks, steps=tuple(steps), measured=(replace(signed, notes=(*signed.notes, *notes)),))
