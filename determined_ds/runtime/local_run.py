"""An experiment, decided and laid out in a run directory, ready to start on this machine.

Loads no torch: whatever is wrong with a configuration is said before a rank is started.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from determined_ds.config.deepspeed_json import load_deepspeed_config
from determined_ds.config.document import Document, nearest
from determined_ds.config.experiment import Experiment, parse_experiment, with_override
from determined_ds.config.hyperparameters import parse_hyperparameters
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.config.text import read_yaml
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, EntrypointError, Problem

EXPERIMENT = "experiment.yaml"


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that will start.

    Args:
        experiment: What was asked for, overrides included.
        resolved: What was decided.
        context_dir: The folder with the code.
        run_dir: Where everything is written.
        checkpoint: To go on from: uuid and steps completed.
    """

    experiment: Experiment
    resolved: ResolvedConfig
    context_dir: Path
    run_dir: Path
    checkpoint: tuple[str, int] | None

    def header(self) -> list[str]:
        """What will run, in a few lines for people."""
        topology, batch = self.resolved.topology, self.resolved.batch
        layout = _count(topology.data_parallel_world_size, "replica")
        if topology.slots_per_replica > 1:
            layout += f" x {topology.pipe_parallel_size} pipeline stages"
        if topology.model_parallel_size > 1:
            layout += f" x {topology.model_parallel_size} model-parallel"
        lines = [
            f"{self.experiment.name}: {self.experiment.trial}",
            f"  slots      {topology.slots} on {self.resolved.accelerator.name}: {layout},"
            f" ZeRO {self.resolved.zero_stage}",
            f"  batch      {batch.global_batch_size} = micro-batch {batch.micro_batch_size}"
            f" x {batch.accumulation} accumulated x {_count(batch.replicas, 'replica')}",
            f"  run dir    {_short(self.run_dir)}",
        ]
        if self.experiment.searched:
            lines.append(f"  one point of a search over {', '.join(self.experiment.searched)}")
        if self.checkpoint:
            lines.append(f"  resume     batch {self.checkpoint[1]}, checkpoint {self.checkpoint[0]}")
        return lines

    def launch(self, *, test: bool = False) -> int:
        """Write the run directory and start the ranks; returns the exit code."""
        self._write()
        from determined_ds.runtime.launch import launch

        arguments = ["--test"] if test else []
        if self.checkpoint:
            arguments += ["--resume", self.checkpoint[0]]
        return launch(
            self.experiment.trial,
            num_ranks=self.resolved.topology.slots,
            accelerator=self.resolved.accelerator,
            context_dir=self.context_dir,
            run_dir=self.run_dir,
            arguments=arguments,
        )

    def _write(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # What is really run: overrides laid over, and the one point of a search.
        config = {**self.experiment.config, "hyperparameters": _as_constants(self.experiment.hyperparameters.data)}
        (self.run_dir / EXPERIMENT).write_text(yaml.safe_dump(config, sort_keys=False))
        metrics = self.run_dir / "metrics.jsonl"
        if self.checkpoint:
            _forget_after(metrics, self.checkpoint[1])
        else:
            metrics.write_text("")


def _as_constants(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as a YAML that the master takes: a mapping with a key ``type`` has to be wrapped."""
    return {key: {"type": "const", "val": value} if _holds_type(value) else value
            for key, value in hyperparameters.items()}


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


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _short(path: Path) -> str:
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
    document = read_yaml(config)
    if not context_dir.is_dir():
        message, mend = "no such folder", "give the folder that holds the model's code, e.g. `.`"
        raise ConfigError(Problem(key="CONTEXT_DIR", value=str(context_dir), message=message, mend=mend))
    if slots is not None:
        document = document.overwritten(("resources", "slots_per_trial"), slots, "--slots")
    for override in overrides:
        document = with_override(document, override)
    experiment = parse_experiment(document)
    check_trial_file(experiment.trial, context_dir, experiment.document)
    devices = detect_accelerator(accelerator)
    hp = parse_hyperparameters(experiment.hyperparameters)
    ds = load_deepspeed_config(
        hp.deepspeed_config, context_dir=context_dir, hyperparameters=experiment.hyperparameters
    )
    resolved = reconcile(
        experiment.hyperparameters,
        ds,
        slots=experiment.slots,
        accelerator=devices,
        slots_origin=document.origin(("resources", "slots_per_trial")),
    )
    run_dir = run_dir or Path("runs") / _slug(experiment.name) / now.strftime("%Y%m%d-%H%M%S")
    return LocalRun(
        experiment=experiment,
        resolved=resolved,
        context_dir=context_dir.resolve(),
        run_dir=run_dir.resolve(),
        checkpoint=_checkpoint_to_resume(run_dir.resolve()) if resume else None,
    )


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name).strip(".") or "run"


def _checkpoint_to_resume(run_dir: Path) -> tuple[str, int]:
    from determined_ds.runtime.checkpoint_files import newest_checkpoint

    found = newest_checkpoint(run_dir / "checkpoints")
    if found is None:
        message = "there is no complete checkpoint in it to resume from"
        mend = "give the --run-dir of the run to go on with, or start anew without --resume"
        raise ConfigError(Problem(key="--run-dir", value=_short(run_dir), message=message, mend=mend))
    return found


def check_trial_file(trial: str, context_dir: Path, document: Document) -> None:
    """Check, without importing it, that the context directory has the entrypoint's module and class.

    A module that is not in the context directory may be installed; that is left to the ranks.
    """
    module, _, name = trial.partition(":")
    parts = module.split(".")
    file = context_dir.joinpath(*parts).with_suffix(".py")
    package = context_dir.joinpath(*parts, "__init__.py")
    source = file if file.is_file() else package
    if not source.is_file():
        if (context_dir / parts[0]).is_dir() or (context_dir / f"{parts[0]}.py").is_file():
            there = sorted(".".join(p.relative_to(context_dir).with_suffix("").parts)
                           for p in (context_dir / parts[0]).rglob("trial.py"))
            guess = nearest(module, there)
            mend = f"did you mean {guess}?" if guess else f"there are: {', '.join(there) or 'none'}"
            raise _entrypoint(document, trial, f"the context directory has no module {module}", mend)
        return
    try:
        tree = ast.parse(source.read_text())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{source.relative_to(context_dir)}:{line}" if line else str(source.relative_to(context_dir))
        raise _entrypoint(document, trial, f"{where} is not Python: {error}", "mend the module") from None
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    # Names may come by import or assignment too; only a plain module of classes can be judged from outside.
    names = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom)
             for alias in node.names}
    assigned = {target.id for node in tree.body if isinstance(node, ast.Assign)
                for target in node.targets if isinstance(target, ast.Name)}
    if name not in {*classes, *names, *assigned} and "*" not in names:
        guess = nearest(name, classes)
        mend = f"did you mean {guess}?" if guess else f"it has: {', '.join(classes) or 'no class'}"
        raise _entrypoint(document, trial, f"module {module} has no {name}", mend)


def _entrypoint(document: Document, trial: str, message: str, mend: str) -> EntrypointError:
    origin = document.origin(("entrypoint",))
    return EntrypointError(
        Problem(key="entrypoint", value=trial, origin=origin, message=message, mend=mend, code="entrypoint")
    )
