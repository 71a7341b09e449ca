"""An experiment, decided and laid out in a run directory, ready to start on this machine.

Loads no torch: whatever is wrong with a configuration is said before a rank is started.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.config.decide import Problems, decide, read_document
from determined_ds.config.document import get_path
from determined_ds.config.experiment import Experiment, parse_experiment
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.text import dump_yaml
from determined_ds.config.trial_file import check_trial_file
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.checkpoint_files import Checkpoint, checkpoints_in, newest_good_checkpoint
from determined_ds.runtime.run_dir import CHECKPOINTS, EXPERIMENT, METRICS

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that will start.

    Args:
        experiment: What was asked for, overrides included.
        resolved: What was decided.
        context_dir: The folder with the code.
        run_dir: Where everything is written.
        checkpoint: To go on from.
        damages: What is wrong with checkpoints that are newer than that.
        accelerator: The one that was asked for, None where it was left to the machine.
    """

    experiment: Experiment
    resolved: ResolvedConfig
    context_dir: Path
    run_dir: Path
    checkpoint: Checkpoint | None
    damages: tuple[str, ...] = ()
    accelerator: str | None = None

    def header(self) -> list[str]:
        """What will run, in a few lines for people."""
        topology, batch = self.resolved.topology, self.resolved.batch
        layout = _count(topology.data_parallel_world_size, "replica")
        if topology.pipe_parallel_size > 1:
            layout += f" x {topology.pipe_parallel_size} pipeline stages"
        if topology.model_parallel_size > 1:
            layout += f" x {topology.model_parallel_size} model-parallel"
        lines = [
            f"{self.experiment.name}: {self.experiment.trial}",
            f"  slots      {topology.slots} on {self.resolved.accelerator.name}: {layout},"
            f" ZeRO {self.resolved.zero_stage}",
            f"  batch      {batch.global_batch_size} = micro-batch {batch.micro_batch_size}"
            f" x {batch.accumulation} accumulated x {_count(batch.replicas, 'replica')}",
            f"  run dir    {short(self.run_dir)}",
        ]
        if self.experiment.searched:
            lines.append(f"  one point of a search: {', '.join(self._searched())}")
        if self.checkpoint:
            at = self.checkpoint.steps_completed
            lines.append(f"  resume     batch {at}, checkpoint {self.checkpoint.uuid}")
            length = self.resolved.fit.max_length
            if length and length.unit == "batches" and at >= _last(length.value):
                lines.append(f"  nothing is left to train: fit.max_length is {_last(length.value)} batches")
        return lines

    def _searched(self) -> list[str]:
        """The searched hyperparameters with the values that were taken for them."""
        point = {"hyperparameters": self.experiment.hyperparameters.data}
        shown = []
        for key in self.experiment.searched:
            value = get_path(point, tuple(key.split(".")))
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.append(f"{key.removeprefix('hyperparameters.')} {text}")
        return shown

    def launch(self, *, test: bool = False, more: Sequence[str] = ()) -> int:
        """Write the run directory and start the ranks; returns the exit code.

        Args:
            test: As ``det-ds run --test``.
            more: More arguments of ``determined_ds.train``.

        Raises:
            ConfigError: the run directory cannot be written to.
        """
        try:
            self._write()
        except OSError as error:
            message = f"cannot be written to: {error.strerror}"
            raise ConfigError(_run_dir_problem(self.run_dir, message, WRITABLE)) from None
        from determined_ds.runtime.launch import launch

        arguments = [*self.experiment.train_options, *(["--test"] if test else []), *more]
        if self.checkpoint:
            arguments += ["--resume", self.checkpoint.uuid]
        return launch(
            self.experiment.trial,
            num_ranks=self.resolved.topology.slots,
            accelerator=self.resolved.accelerator,
            context_dir=self.context_dir,
            run_dir=self.run_dir,
            arguments=arguments,
            resume_with=self.resume_command,
        )

    @property
    def resume_command(self) -> str:
        """What to type to go on with this run, just as it was."""
        words = ["det-ds", "run", short(self.run_dir / EXPERIMENT), short(self.context_dir)]
        words += ["--run-dir", short(self.run_dir), "--resume"]
        if self.accelerator:
            words += ["--accelerator", self.accelerator]
        return shlex.join(words)

    def _write(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # What is really run: overrides laid over, and the one point of a search.
        config = {
            **self.experiment.config,
            "hyperparameters": as_constants(self.experiment.hyperparameters.data),
        }
        (self.run_dir / EXPERIMENT).write_text(dump_yaml(config), encoding="utf-8")
        metrics = self.run_dir / METRICS
        if self.checkpoint:
            _forget_after(metrics, self.checkpoint.steps_completed)
        else:
            metrics.write_text("")


def as_constants(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as a YAML that the master takes: a mapping with a key ``type`` has to be wrapped."""
    return {
        key: {"type": "const", "val": value} if _holds_type(value) else value
        for key, value in hyperparameters.items()
    }


def _holds_type(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return "type" in value or any(_holds_type(item) for item in value.values())


def _forget_after(metrics: Path, steps: int) -> None:
    """Drop the metrics of batches that will be trained again."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            if json.loads(line)["steps_completed"] <= steps:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a killed run left half-written
    metrics.write_text("".join(kept))


def _last(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else max(value)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def short(path: Path) -> str:
    """A path as people would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def prepare_run(
    config: Path,
    context_dir: Path,
    *,
    slots: int | None,
    overrides: Iterable[str],
    run_dir: Path | None,
    resume: bool,
    accelerator: str | None,
    now: datetime,
) -> LocalRun:
    """Decide a run from what ``det-ds run`` was given.

    Raises:
        ConfigError: it cannot run; every reason that is known before a rank is started.
    """
    experiment = parse_experiment(read_document(config, context_dir, slots=slots, overrides=overrides))
    found = Problems()
    found.of(lambda: check_trial_file(experiment.trial, context_dir, experiment.document))
    devices = found.of(lambda: detect_accelerator(accelerator))
    point = experiment.hyperparameters
    resolved = None
    if devices is not None:
        resolved = found.of(lambda: decide(experiment, point, context_dir=context_dir, accelerator=devices))
    where = run_dir or new_run_dir(RUNS / slug(experiment.name), now)
    starts = found.of(lambda: _start_in(where, resume=resume, stated=run_dir is not None))
    checkpoint, damages = starts or (None, ())
    if checkpoint:
        found.of(lambda: _check_writers(checkpoint, experiment))
    found.raise_any()
    assert resolved is not None
    return LocalRun(
        experiment=experiment,
        resolved=resolved,
        context_dir=context_dir.resolve(),
        run_dir=where.resolve(),
        checkpoint=checkpoint,
        damages=damages,
        accelerator=accelerator,
    )


# --------------------------------------------------------------------------------------- the run directory

WRITABLE = "give a --run-dir that can be written to"


def _run_dir_problem(run_dir: Path, message: str, mend: str) -> Problem:
    return Problem(key="--run-dir", value=short(run_dir), message=message, mend=mend, code="run-dir")


def slug(name: str) -> str:
    """An experiment's name as that of a folder."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name).strip(".") or "run"


def new_run_dir(folder: Path, now: datetime) -> Path:
    """A folder named for the time, that is not there yet: two runs may start in the same second."""
    stem = now.strftime("%Y%m%d-%H%M%S")
    path, number = folder / stem, 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}"
    return path


def _start_in(run_dir: Path, *, resume: bool, stated: bool) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint to start from, None for the beginning, and what is wrong with those after it."""
    check_run_dir(run_dir)
    if resume:
        return _checkpoint_to_resume(run_dir, stated=stated)
    _refuse_to_overwrite(run_dir)
    return None, ()


def check_run_dir(run_dir: Path) -> None:
    """Refuse a run directory that cannot be written to."""
    there = run_dir.resolve()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(_run_dir_problem(run_dir, f"{short(there)} is a file, not a folder", WRITABLE))
    if not os.access(there, os.W_OK | os.X_OK):
        message = f"no permission to write in {short(there)}"
        raise ConfigError(_run_dir_problem(run_dir, message, WRITABLE))


def _refuse_to_overwrite(run_dir: Path) -> None:
    there = checkpoints_in(run_dir / CHECKPOINTS)
    if there:
        message = f"holds a run already, trained to batch {there[0].steps_completed}"
        mend = "add --resume to go on with it, or give another --run-dir to start anew"
        raise ConfigError(_run_dir_problem(run_dir, message, mend))


def _check_writers(checkpoint: Checkpoint, experiment: Experiment) -> None:
    """A checkpoint has one part for each rank that wrote it."""
    writers = len(list(checkpoint.path.glob("det_state_dict_rank*.pth")))
    if writers in (0, experiment.slots):  # 0: not one of ours; the ranks will say
        return
    path = ("resources", "slots_per_trial")
    raise ConfigError(
        Problem(
            key=experiment.document.key(path),
            value=experiment.slots,
            origin=experiment.document.origin(path),
            message=f"checkpoint {checkpoint.uuid} was written by {_count(writers, 'rank')}",
            mend=f"resume with --slots {writers}, or start anew in another --run-dir, without --resume",
            code="resume-slots",
        )
    )


def _checkpoint_to_resume(run_dir: Path, *, stated: bool) -> tuple[Checkpoint | None, tuple[str, ...]]:
    if not stated:  # of which run? The newest one of the same experiment is a good guess
        siblings = run_dir.parent.glob("*")
        runs = sorted((path for path in siblings if checkpoints_in(path / CHECKPOINTS)), reverse=True)
        mend = f"add --run-dir {runs[0]}" if runs else "add the --run-dir of the run to go on with"
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", mend=mend))
    good, damages = newest_good_checkpoint(run_dir / CHECKPOINTS)
    if good is None and not damages and (run_dir / EXPERIMENT).is_file():
        return None, ("it was ended before its first checkpoint, and starts from the beginning",)
    if good is None:
        message = "; ".join(["there is no complete checkpoint in it to resume from", *damages])
        mend = "give the --run-dir of the run to go on with, or start anew in another, without --resume"
        raise ConfigError(_run_dir_problem(run_dir, message, mend))
    return good, tuple(damages)
