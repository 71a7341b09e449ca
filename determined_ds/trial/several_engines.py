"""SeveralEnginesTrial: models that train against or beside each other, each with its own engine."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.params import PARALLEL_SIZES
from determined_ds.config.resolve import Where, resolve
from determined_ds.errors import ConfigError
from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.returned import refused

CODE = "several-engines"
# One data loader feeds all engines, one loop counts their steps, and either all compile or none.
SHARED = (
    *("global_batch_size", "data_parallel_world_size", "micro_batch_size", *PARALLEL_SIZES, "trial_seed"),
    *("torch_compile", "pipe_schedule", "pipe_chunks", "partition_method", "fit"),
)


class SeveralEnginesTrial(ReconciledTrial):
    """Write the models, the training step and the data; each engine gets its own DeepSpeed configuration.

    A hyperparameter ``<engine>_<name>`` stands for ``<name>`` where that engine is configured::

        deepspeed_config: experiments/deepspeed/zero1.json     # of all engines
        learning_rate: 0.0002
        generator_overwrite_deepspeed_args:                    # overrides overwrite_deepspeed_args, leaf by leaf
          zero_optimization: {stage: 2}
        discriminator_learning_rate: 0.0001                    # instead of learning_rate

    The batch sizes are the same for all, so one loader feeds them. ``train_batch`` is one optimizer step of every
    engine: it takes ``self.resolved.batch.accumulation`` micro-batches, and runs each engine over all of them before
    the next engine; otherwise the first would step between the micro-batches of the second.

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
        if (stages := self.resolved.topology.pipe_parallel_size) > 1:
            key, message = "hyperparameters.pipe_parallel_size", "several engines do not run as pipelines"
            raise refused(key, message, "pipe_parallel_size: 1", CODE, value=stages)
        models, name = self.build_models(), "build_models"
        expected, fix = "a dict of engines' names and their models", 'return {"one": ..., "other": ...}'
        returned.check(isinstance(models, dict) and bool(models), self, name, models, expected, fix)
        self.ds_configs = {engine: self._decide(engine) for engine in models}
        self.engines = {}
        for self.building, model in models.items():
            checked = returned.model(self, model, name)
            self.engines[self.building] = self.initialize(checked, self.ds_configs[self.building])
        self.engine = next(iter(self.engines.values()))

    def _decide(self, engine: str) -> dict[str, Any]:
        """The DeepSpeed configuration of an engine, for which ``<engine>_<name>`` overrides ``<name>``."""
        resolved, prefix, changes = self.resolved, f"{engine}_", []
        stated = resolved.hyperparameters
        for key, value in stated.data.items():
            if (name := str(key).removeprefix(prefix)) == key:
                continue
            if name in SHARED:
                message, fix = "must be the same for all engines", f"set {name}, without {prefix}"
                raise ConfigError(stated.problem((key,), message, fix, CODE))
            origin = stated.origin((key,))
            changes.append(((name,), value, origin.reworded(f"{key}, {origin}")))
        kind, slots, machines = resolved.accelerator, resolved.topology.slots, resolved.machines
        where = Where(context_dir=Path.cwd(), accelerator=kind, slots=slots, machines=machines)
        found = resolve(stated.overwritten(*changes), where).writing_in(resolved.folder)
        if found.batch != resolved.batch:
            message = f"makes other micro-batches for the {engine} than the data loader's"
            fix = "set batch sizes for all engines, in overwrite_deepspeed_args"
            raise refused(f"hyperparameters.{prefix}overwrite_deepspeed_args", message, fix, CODE)
        return found.ds_config

    @abc.abstractmethod
    def build_models(self) -> dict[str, torch.nn.Module]:
        """Build the models, on the CPU, with their initial weights: the same on every rank.

        Returns:
            Name of an engine -> its bare model. In a checkpoint, the first is ``model0``.
        """

    def build_model(self) -> torch.nn.Module:
        """The first model of :meth:`build_models`, which a checkpoint is loaded into."""
        return next(iter(self.build_models().values()))
