"""Trials: hyperparameters -> ResolvedConfig -> model -> engine -> wrap_model_engine; replicas of one model."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from attrdict import AttrDict
from determined import pytorch
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.params import PARALLEL_SIZES
from determined_ds.config.resolve import ResolvedConfig, Where, resolve
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.trial import returned
from determined_ds.trial.ddp import DDP, DDPEngine
from determined_ds.trial.engine import CHECKPOINTING, check_upstream, compile_engine, make_engine
from determined_ds.trial.returned import refused
from determined_ds.trial.sequence import DeepSpeedMPU, SequenceGroup
from determined_ds.trial.stream_loader import StreamLoader, is_stream

# One data loader feeds all engines, one loop counts their steps, and either all compile or none.
SHARED = (
    *("global_batch_size", "data_parallel_world_size", "micro_batch_size", *PARALLEL_SIZES, "trial_seed"),
    *("torch_compile", "pipe_schedule", "pipe_chunks", "partition_method", "fit"),
)


class ReconciledTrial(det_ds.DeepSpeedTrial):
    """A ``DeepSpeedTrial`` whose engine is built from the reconciled configuration.

    Subclass :class:`~determined_ds.DataParallelTrial` or :class:`~determined_ds.PipelineTrial`.

    Attributes:
        context: Determined's context.
        args: The hyperparameters by attribute, read-only (``attrdict`` turns lists to tuples).
        resolved: The configuration that was decided before anything ran.
        engine: The DeepSpeed engine.
        validation_metrics: Names of the metrics that validation reports, which ``det-ds check`` compares with
            ``searcher.metric``; declare them where the code does not show them. Or name -> how the values of all
            batches become one: ``mean`` (over samples), ``sum``, ``max``, ``min``; or a function of all predictions,
            such as ``sklearn.metrics.roc_auc_score``. Metrics that it does not name are means.
        is_whole: Whether :meth:`build_model` makes the whole model on every rank; false in a pipeline.
        sequence_parallel: Whether it computes on slices of sequences; else a ``sequence_parallel_size`` is refused.
        sequence: The ranks that share this rank's sequences; this one alone, where sequences are whole.
    """

    engine: Any
    validation_metrics: Sequence[str] | Mapping[str, Any] = ()
    is_whole = True
    sequence_parallel = False
    sequence = SequenceGroup()

    def __init__(self, context: det_ds.DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(context.get_hparams())
        self.resolved = self._resolved_of(context)
        check_upstream()
        size = self.resolved.topology.sequence_parallel_size
        if size > 1 and not self.sequence_parallel:
            key, message = "sequence_parallel_size", f"{type(self).__name__} computes on whole sequences"
            fix = "set it to 1; or write the trial for slices, and say so by sequence_parallel = True"
            raise ConfigError(self.resolved.hyperparameters.problem((key,), message, fix, "sequence-trial"))
        self._by_ddp = getattr(context, "engine", None) == DDP
        if self._by_ddp and (self.resolved.topology.per_replica > 1 or not self.is_whole):
            message = "torch's DistributedDataParallel holds the whole model on every rank: it cannot run a pipeline"
            fix = "train it with DeepSpeed; ddp takes trials of pipe_parallel_size 1, and no PipelineTrial"
            raise refused("engine", message, fix, DDP, value=DDP)
        if getattr(context, "distributed", None) is not None:  # else it is built to be measured or exported
            self.sequence = SequenceGroup(size)
        self.prepare()
        self._build()

    def _build(self) -> None:
        """Build the model and its engine."""
        # A pipeline's layers cut themselves; where initialize is another, there may be an mpu of its own.
        if self.is_whole and type(self).initialize is ReconciledTrial.initialize:
            found = self.resolved.with_tensor_parallel()  # where the JSON does not say how
            if found is not self.resolved and hasattr(self.context, "_decide"):
                self.context._decide(found)  # writes the file of what DeepSpeed is given again: a collective
            self.resolved = found
        self.engine = self.initialize(returned.model(self, self.build_model()), self.resolved.ds_config)

    def _resolved_of(self, context: Any) -> ResolvedConfig:
        """The configuration of a context; refused is what Determined's own loop would silently leave out."""
        if isinstance(resolved := getattr(context, "resolved", None), ResolvedConfig):
            return resolved
        has_hook = type(self).on_step_end is not ReconciledTrial.on_step_end
        if has_hook or isinstance(self.validation_metrics, Mapping):
            name = f"{type(self).__name__}.{'on_step_end' if has_hook else 'validation_metrics'}"
            message = "has no effect under Determined's own context and Trainer"
            fix = "open the context by determined_ds.open_context and train by determined_ds.Trainer"
            raise refused(name, message, fix, "own-loop")
        ranks, kind = context.distributed, detect_accelerator()
        where = Where(context_dir=Path.cwd(), accelerator=kind, slots=ranks.size, machines=ranks.cross_size)
        stated = Document(name="hyperparameters", data=context.get_hparams(), prefix="hyperparameters")
        return resolve(stated, where)

    def prepare(self) -> None:
        """Read the data, set up what the model needs. Runs before :meth:`build_model`."""

    @abc.abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Build the bare model, on the CPU, with its initial weights: the same on every rank that holds it."""

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """Build your own optimizer over parameters of ``model``, in place of the one in the DeepSpeed JSON."""
        return None

    def build_parameters(self, model: torch.nn.Module) -> Any:
        """Choose the parameters that the JSON's optimizer trains; by default all that require a gradient.

        Returns:
            Parameters, or groups such as ``{"params": [...], "weight_decay": 0.0}``.
        """
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build your own learning-rate schedule, in place of the one in the DeepSpeed JSON.

        It steps once an optimizer step, and not where fp16 skips that; so ``ReduceLROnPlateau`` is refused.
        Checkpoints hold it. A ``scheduler`` in the JSON beside it is refused;
        ``overwrite_deepspeed_args: {scheduler: null}`` removes that.

        Args:
            optimizer: Your own, or the one that DeepSpeed built; its groups are those of :meth:`build_parameters`.

        Returns:
            E.g. ``torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.total_steps)``; None
            takes the one in the JSON, and is refused where that has none: a ``return`` was forgotten.
        """
        return None

    def weight_names(self, model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """More names of the model's parameters and buffers, under which checkpoints hold them too.

        Where two trials train one model in different forms, such as whole and as a pipeline, give both the same names:
        each then resumes from the checkpoints of the other. Of a pipeline, ``model`` has the layers of this rank.
        """
        return {}

    def huggingface_config(self) -> Any:
        """The ``transformers.PreTrainedConfig`` of the model that the weights are of; only for export.

        A model of transformers that :meth:`build_model` returns, alone or inside another module, says it itself. For
        others, such as a pipeline whose :meth:`weight_names` are Hugging Face's, return one that names the class of the
        model in ``architectures``.
        """
        return None

    def export_files(self, folder: Path) -> None:
        """Write what users of exported weights need beside them, such as a tokenizer, into an export's ``folder``."""

    def on_step_end(self, batch_idx: int, metrics: Mapping[str, Any]) -> None:
        """Called after each optimizer step, before what is due after it: reports, validations, checkpoints.

        Args:
            batch_idx: The step just taken, from 0.
            metrics: What :meth:`train_batch` returned, each the mean over this rank's micro-batches, on the device:
                reading one waits for the device. Empty on ranks that report none (all but the last pipeline stage).
        """

    def split_sequence(self, batch: Any) -> Any:
        """This rank's slice of a micro-batch, where ranks share sequences: what :meth:`loss` is called with.

        Labels are shifted before, in the dataset or here: the last token of a slice has its label in the next one.
        Tensors are ``(samples, tokens, ...)``, the same on all ranks of :attr:`sequence`.
        """
        return self.sequence.cut(batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, for a schedule: ``hyperparameters.fit.max_length`` in batches.

        Raises:
            ConfigError: the length is in epochs, or missing.
        """
        length = self.resolved.fit.max_length
        if length is None or length.unit != "batches" or not isinstance(length.value, int):
            message = "total_steps needs the length of training in batches"
            fix, key = "write fit: {max_length: {batches: N}}", "hyperparameters.fit.max_length"
            raise refused(key, message, fix, "total-steps", value=length and f"{length.value} {length.unit}")
        return length.value

    def save(self, context: Any, path: Path) -> None:
        """Write the engines into a checkpoint's folder. To add files of your own, override it and call ``super``'s."""
        files = getattr(context, "engine_files", None)
        super().save(context, path) if files is None else files.save(path)

    def load(self, context: Any, path: Path) -> None:
        """Read the engines from a checkpoint's folder; with :meth:`save`."""
        files = getattr(context, "engine_files", None)
        super().load(context, path) if files is None else files.load(path)

    def initialize(self, model: torch.nn.Module, ds_config: dict[str, Any]) -> Any:
        """``deepspeed.initialize`` and ``context.wrap_model_engine``; call it again for a second engine.

        Where ``torch_compile`` or the JSON's ``compile.deepcompile`` asks for it, the engine compiles its model. The
        JSON's ``activation_checkpointing`` sets the options of ``deepspeed.checkpointing.checkpoint``. Where the
        context asks for ``ddp``, the engine is torch's own DistributedDataParallel, to compare with.

        Args:
            model: The bare model.
            ds_config: The mapping for DeepSpeed, every ``"auto"`` filled: ``self.resolved.ds_config``.
        """
        optimizer, parameters = returned.trained(self, model, ds_config)
        if section := ds_config.get("activation_checkpointing"):  # no engine passes it on
            # Option by option: with the whole JSON, it would check the batch as if every rank were a replica.
            deepspeed.checkpointing.configure(None, None, *map(section.get, CHECKPOINTING))
        if self._by_ddp:
            engine: Any = DDPEngine(model, optimizer, parameters, ds_config, self.context.device)
        else:
            engine = make_engine(model, optimizer, parameters, ds_config, self.sequence.unit)
        returned.give_schedule(self, engine, ds_config)
        if self.resolved.torch_compile or (ds_config.get("compile") or {}).get("deepcompile"):
            compile_engine(engine)
        is_first = not self.context.models
        engine = self.context.wrap_model_engine(engine)
        if self.sequence.size > 1 and is_first and not self.context._called_set_mpu:
            self.context.set_mpu(DeepSpeedMPU(engine.mpu))  # Determined's own: a group is one replica
        return engine

    @property
    def micro_batch_size(self) -> int:
        """Samples that a data loader yields at a time (``train_micro_batch_size_per_gpu``)."""
        return self.resolved.batch.micro_batch_size

    def training_loader(self, dataset: Any, **options: Any) -> Any:
        """A data loader over ``dataset``, in micro-batches, shuffled where it has an index.

        Args:
            dataset: With an index (``__getitem__`` and ``__len__``); or a stream: an ``IterableDataset``, anything else
                that can be iterated again and again, or a function that returns an iterator.
            options: Of Determined's ``DataLoader``, or of ``StreamLoader``.
        """
        return self._loader(dataset, {"shuffle": True, "drop_last": True}, options)

    def validation_loader(self, dataset: Any, **options: Any) -> Any:
        """The same in order, to the last sample."""
        return self._loader(dataset, {}, options)

    def _loader(self, dataset: Any, defaults: dict[str, Any], options: dict[str, Any]) -> Any:
        if "batch_size" in options:
            message = f"is not an option of a loader of the trial: it is the micro-batch size, {self.micro_batch_size}"
            fix = "leave it out: it is set by global_batch_size, or by train_micro_batch_size_per_gpu"
            raise refused("batch_size", message, fix, "loader-batch-size", value=options["batch_size"])
        known = set(inspect.signature(pytorch.DataLoader).parameters) - {"dataset", "batch_size"}
        if is_stream(dataset):  # it has no order to choose from
            known = known - {"shuffle", "sampler", "batch_sampler", "drop_last"} | {"sharded"}
        if unknown := sorted(options.keys() - known):
            what = "a stream's loader" if is_stream(dataset) else "a loader of the trial"
            fix = f"use one of {', '.join(sorted(known))}, or leave it out"
            raise refused(unknown[0], f"is not an option of {what}", fix, "loader-option")
        options = {"batch_size": self.micro_batch_size, **options}
        if torch.device(self.context.device).type == "cuda":  # batches are copied while the GPU computes
            options.setdefault("pin_memory", True)
        if is_stream(dataset):
            return StreamLoader(dataset, **options)
        return pytorch.DataLoader(dataset, **{**defaults, **options})

    def tokens_per_sample(self) -> int | None:
        """Tokens in a training sample, for the metric ``tokens_per_second``; None where samples have no tokens."""
        return None


class DataParallelTrial(ReconciledTrial):
    """Write the model, the loss and the data; the library does the rest.

    Example::

        class MyTrial(DataParallelTrial):
            def build_model(self):
                return torch.nn.Linear(10, 1)

            def loss(self, model, batch):
                inputs, targets = batch
                return torch.nn.functional.mse_loss(model(inputs), targets)

            def build_training_data_loader(self):
                return self.training_loader(my_training_set)

            def build_validation_data_loader(self):
                return self.validation_loader(my_validation_set)
    """

    @abc.abstractmethod
    def loss(self, model: Any, batch: Any) -> torch.Tensor | dict[str, Any]:
        """The mean loss of a micro-batch.

        Args:
            model: The engine; call it as the model.
            batch: One micro-batch, on the device.

        Returns:
            A scalar tensor, or metrics by name whose ``loss`` is the scalar to descend.
        """

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        """Validation metrics of a batch by name, each a mean over its samples; by default those of :meth:`loss`.

        Args:
            model: The engine, in evaluation mode, without gradients.
            batch: One micro-batch, on the device; the last one may be smaller.
        """
        metrics = returned.losses(self, self.loss(model, batch), trains=False)
        return {f"validation_{name}": value for name, value in metrics.items()}

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one micro-batch, and return the metrics of :meth:`loss`; the engine steps after an accumulation."""
        batch = self.split_sequence(self.context.to_device(next(dataloader_iter)))
        metrics = returned.losses(self, self.loss(self.engine, batch))
        self.engine.backward(metrics["loss"])
        self.engine.step()
        return {**metrics, "loss": metrics["loss"].detach()}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        """The metrics of the next micro-batch by :meth:`evaluate`; see Determined's method of this name."""
        return self.evaluate(self.engine, self.split_sequence(self.context.to_device(next(dataloader_iter))))


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
            raise refused(key, message, "pipe_parallel_size: 1", "several-engines", value=stages)
        models, name = self.build_models(), "build_models"
        expected, fix = "a dict of engines' names and their models", 'return {"one": ..., "other": ...}'
        returned.check(isinstance(models, dict) and bool(models), self, name, models, expected, fix)
        self.ds_configs, self.engines = {engine: self._decide(engine) for engine in models}, {}
        for self.building, model in models.items():
            checked = returned.model(self, model, name)
            self.engines[self.building] = self.initialize(checked, self.ds_configs[self.building])
        self.engine = next(iter(self.engines.values()))

    def _decide(self, engine: str) -> dict[str, Any]:
        """The DeepSpeed configuration of an engine, for which ``<engine>_<name>`` overrides ``<name>``."""
        resolved, stated, prefix, changes = self.resolved, self.resolved.hyperparameters, f"{engine}_", []
        for key, value in stated.data.items():
            if (name := str(key).removeprefix(prefix)) == key:
                continue
            if name in SHARED:
                message, fix = "must be the same for all engines", f"set {name}, without {prefix}"
                raise ConfigError(stated.problem((key,), message, fix, "several-engines"))
            origin = stated.origin((key,))
            changes.append(((name,), value, origin.reworded(f"{key}, {origin}")))
        kind, slots, machines = resolved.accelerator, resolved.topology.slots, resolved.machines
        where = Where(context_dir=Path.cwd(), accelerator=kind, slots=slots, machines=machines)
        found = resolve(stated.overwritten(*changes), where).writing_in(resolved.folder)
        if found.batch != resolved.batch:
            message = f"makes other micro-batches for the {engine} than the data loader's"
            fix = "set batch sizes for all engines, in overwrite_deepspeed_args"
            key = f"hyperparameters.{prefix}overwrite_deepspeed_args"
            raise refused(key, message, fix, "several-engines")
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
