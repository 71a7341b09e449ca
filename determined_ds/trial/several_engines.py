"""SeveralEnginesTrial: models that train against or beside each other, each with its own engine."""

from __future__ import annotations

import abc
import json
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.params import PARALLEL_SIZES
from determined_ds.config.resolve import ResolvedConfig, Where, resolve
from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial

# One data loader feeds all engines, one loop counts their steps, and either all compile or none.
SHARED = (
    "global_batch_size",
    "data_parallel_world_size",
    *PARALLEL_SIZES,
    "micro_batch_size",
    "trial_seed",
    "torch_compile",
    "sdpa_kernel",
    "pipe_schedule",
    "pipe_chunks",
    "partition_method",
    "fit",
)

WHY_SHARED = {"torch_compile": "all compile, or none", "trial_seed": "a trial has one seed"}


class SeveralEnginesTrial(ReconciledTrial):
    """Write the models, the training step and the data; each engine gets its own DeepSpeed configuration.

    A hyperparameter ``<engine>_<name>`` stands for ``<name>`` where that engine is configured::

        deepspeed_config: experiments/deepspeed/zero1.json     # of all engines
        learning_rate: 0.0002
        generator_overwrite_deepspeed_args:                    # overrides overwrite_deepspeed_args, leaf by leaf
          zero_optimization: {stage: 2}
        discriminator_learning_rate: 0.0001                    # instead of learning_rate
        discriminator_deepspeed_config: experiments/deepspeed/zero0.json

    The batch sizes are the same for all, so one loader feeds them. ``train_batch`` is one optimizer step of every
    engine: it takes ``self.resolved.batch.accumulation`` micro-batches, and runs each engine over all of them before
    the next engine. (With one micro-batch at a time for all engines, the first would step between the micro-batches of
    the second.)

    Attributes:
        engines: Name -> engine, in the order of :meth:`build_models`.
        engine: The first of them, whose learning rate and gradient norm are reported.
        ds_configs: Name -> the DeepSpeed configuration.
        building: The engine that is being built, for ``build_optimizer``, ``build_parameters`` and ``build_scheduler``.
    """

    engines: dict[str, Any]
    ds_configs: dict[str, dict[str, Any]]
    building: str

    def __init__(self, context: det_ds.DeepSpeedTrialContext) -> None:
        context.disable_auto_grad_accumulation()
        super().__init__(context)

    def _build(self) -> None:
        models = returned.models(self, self.build_models())
        self.ds_configs = engine_configs(_hyperparameters(self.context), self.resolved, tuple(models))
        self._write_ds_configs()
        self.engines = {}
        for self.building, model in models.items():
            self.engines[self.building] = self.initialize(model, self.ds_configs[self.building])
        self.engine = next(iter(self.engines.values()))

    @abc.abstractmethod
    def build_models(self) -> dict[str, torch.nn.Module]:
        """Build the models, on the CPU, with their initial weights: the same on every rank.

        Returns:
            Name of an engine -> its bare model. In a checkpoint, the first is ``model0``.
        """

    def build_model(self) -> torch.nn.Module:
        """The first model, which a checkpoint is loaded into.

        Returns:
            The first value of :meth:`build_models`.
        """
        return next(iter(self.build_models().values()))

    def _write_ds_configs(self) -> None:
        """Beside the shared mapping, what each engine was given."""
        shared = self.context.get_hparams().get("deepspeed_config")
        is_chief = hasattr(self.context, "resolved") and self.context.distributed.rank == 0
        if isinstance(shared, str) and is_chief:
            for name, ds_config in self.ds_configs.items():
                path = Path(shared).with_name(f"deepspeed_config.{name}.json")
                write_whole(path, json.dumps(ds_config, indent=2) + "\n")


def _hyperparameters(context: Any) -> Document:
    """The hyperparameters as written, with their places where the context knows them."""
    known = getattr(context, "_hyperparameters", None)
    if isinstance(known, Document):
        return known
    return Document(name="hyperparameters", data=context.get_hparams(), prefix="hyperparameters")


def engine_configs(
    hyperparameters: Document, resolved: ResolvedConfig, engines: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Reconcile the DeepSpeed configuration of each engine.

    Args:
        hyperparameters: Of the trial.
        resolved: What all engines share: slots, accelerator and batch sizes.
        engines: Their names.

    Returns:
        Name -> a mapping for ``deepspeed.initialize``.

    Raises:
        ConfigError: All that cannot run, of all engines.
    """
    configs: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    if resolved.topology.pipe_parallel_size > 1:
        message, fix = "several engines do not run as pipelines", "pipe_parallel_size: 1"
        key, value = "hyperparameters.pipe_parallel_size", resolved.topology.pipe_parallel_size
        problems.append(Problem(key=key, value=value, message=message, fix=fix, code="several-engines"))
    for engine in engines if not problems else ():
        own = _own_of_shared(hyperparameters, engine)
        problems.extend(own)
        if own:
            continue
        try:
            found = _reconciled(engine_hyperparameters(hyperparameters, engine), resolved)
        except ConfigError as error:
            problems.extend(problem for problem in error.problems if problem not in problems)
            continue
        problems.extend(_other_batch(engine, found, resolved))
        configs[engine] = found.ds_config
    if problems:
        raise ConfigError(problems)
    return configs


def engine_hyperparameters(hyperparameters: Document, engine: str) -> Document:
    """The hyperparameters of one engine: ``<engine>_<name>`` overrides ``<name>``."""
    prefix = f"{engine}_"
    changes: list[tuple[KeyPath, Any, str]] = []
    for key, value in hyperparameters.data.items():
        if isinstance(key, str) and key.startswith(prefix):
            origin = hyperparameters.origin((key,))
            changes.append(((key.removeprefix(prefix),), value, origin.reworded(f"{key}, {origin}")))
    return hyperparameters.overwritten_all(changes)


def _own_of_shared(hyperparameters: Document, engine: str) -> list[Problem]:
    """A problem for each hyperparameter that an engine states and that all must share."""
    return [
        hyperparameters.problem(
            (f"{engine}_{name}",),
            f"is one for all engines: {WHY_SHARED.get(name, 'one data loader feeds them')}",
            f"set {name}, without {engine}_",
            "several-engines",
        )
        for name in SHARED
        if f"{engine}_{name}" in hyperparameters.data
    ]


def _reconciled(hyperparameters: Document, resolved: ResolvedConfig) -> ResolvedConfig:
    where = Where(
        context_dir=Path.cwd(),
        accelerator=resolved.accelerator,
        slots=resolved.topology.slots,
        machines=resolved.machines,
    )
    return resolve(hyperparameters, where).writing_in(resolved.folder)


def _other_batch(engine: str, found: ResolvedConfig, resolved: ResolvedConfig) -> list[Problem]:
    if found.batch == resolved.batch:
        return []
    own, shared = found.batch, resolved.batch
    return [
        Problem(
            key=f"hyperparameters.{engine}_overwrite_deepspeed_args",
            message=f"makes micro-batch {own.micro_batch_size} x {own.accumulation} accumulated for the {engine}, "
            f"and the data loader's is {shared.micro_batch_size} x {shared.accumulation}",
            fix="set batch sizes for all engines, in overwrite_deepspeed_args",
            code="several-engines",
        )
    ]
