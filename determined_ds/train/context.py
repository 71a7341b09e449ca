"""Determined's DeepSpeedTrialContext on any accelerator; :func:`~determined_ds.open_context` makes it."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import core
from determined.errors import CheckpointNotFound
from determined.pytorch import deepspeed as det_ds

from determined_ds.checkpoints.files import STATE
from determined_ds.checkpoints.rank_state import read_state
from determined_ds.checkpoints.storage import find_checkpoint
from determined_ds.config.layout import BATCH_KEYS, Accelerator, Topology
from determined_ds.config.params import AUTO, PARALLEL_SIZES, SHORTHANDS, SIZES, by_real_names
from determined_ds.config.resolve import ResolvedConfig, reconcile
from determined_ds.documents.document import Document, dotted, leaves
from determined_ds.documents.files import write_whole
from determined_ds.documents.text import as_plain
from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError, shown
from determined_ds.pipe.orders import ONE_F_ONE_B
from determined_ds.pipe.partition import MEASURED
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.rundir.records import Faults, relink
from determined_ds.rundir.run_dir import RunDir, make_private
from determined_ds.train.data.loaders import moved
from determined_ds.train.group.process_group import only_errors
from determined_ds.train.loop.metrics import plain
from determined_ds.train.rank import cluster_info
from determined_ds.trial.ddp import engine_name
from determined_ds.trial.divided import degree_of, is_copy
from determined_ds.trial.engine import ENGINES, fix_engine
from determined_ds.trial.pipeline_engine import PlannedEngine
from determined_ds.trial.returned import refused
from determined_ds.trial.sequence import DeepSpeedMPU

logger = logging.getLogger("determined_ds")
# Hyperparameters of the library that no engine knows; all others it has settled already.
KEPT = ("torch_compile", "fit", "trial_seed")
MADE = "the engine that the trial wraps"


class DeepSpeedTrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, not tied to CUDA, with the reconciled configuration.

    :func:`~determined_ds.open_context` makes it; a trial gets it as the argument of its ``__init__``. Where neither
    the hyperparameters nor a DeepSpeed JSON that they name say the batch, it opens undecided: the first engine that
    is wrapped says it, and everything else that was left open.

    Attributes:
        faults: Of the run until now, that it recovers from by itself.
        engine: What trains: ``deepspeed``, or ``ddp`` for torch's own DistributedDataParallel, as a baseline.
        resumed_from: The checkpoint that training continues from, as far as it is known before the trial is built.
        partition: Text of ``partition.json``, where the layers of a pipeline are shared out by their times.
        decided_before: What was decided before the trial made its engine; None where that was left open.
    """

    engine = "deepspeed"
    faults = Faults()

    def __init__(
        self,
        *,
        core_context: core.Context,
        resolved: ResolvedConfig | ConfigError,  # the latter: why it is open until the first engine says it
        hyperparameters: Document | None,
        accelerator: Accelerator,
        run_dir: RunDir,
        **theirs: Any,  # more of Determined's own arguments
    ) -> None:
        self._resolved = resolved
        self.decided_before = resolved if isinstance(resolved, ResolvedConfig) else None
        self._accelerator = accelerator
        self._hyperparameters = hyperparameters or Document(name="hyperparameters", data={})
        self._run_dir = run_dir
        self.resumed_from: str | None = None
        self.partition: str | None = None
        with only_errors("determined.pytorch"):  # a warning that APEX is missing, which ZeRO no longer needs
            super().__init__(
                core_context=core_context,
                hparams=None,
                slots_per_trial=core_context.distributed.size,
                num_gpus=accelerator.num_devices if accelerator.name == "cuda" else 0,
                **theirs,
            )
        if hyperparameters is not None:
            self._hparams = dict(hyperparameters.data)
            self._global_batch_size = hyperparameters.get(("global_batch_size",))
        if isinstance(resolved, ResolvedConfig):
            self._decide(resolved)

    @property
    def resolved(self) -> ResolvedConfig:
        """What was decided: before anything ran, or by the first engine that was wrapped.

        Raises:
            ConfigError: the batch is not determined yet.
        """
        if isinstance(self._resolved, ConfigError):
            message = "is not known before an engine is wrapped, since the hyperparameters leave it open"
            fix = "state what is missing, or call context.wrap_model_engine(engine) first"
            own = Problem(key="context.resolved", message=message, fix=fix, code="undecided")
            raise ConfigError([*self._resolved.problems, own])
        return self._resolved

    def _decide(self, resolved: ResolvedConfig) -> None:
        """Go by a configuration from now on; a collective of each machine, of which one rank writes it to a file."""
        self._resolved, batch = resolved, resolved.batch
        folder = self._run_dir.current(self._run_dir.path)
        path = RunDir(folder).deepspeed_config
        if self.distributed.local_rank == 0:
            make_private(folder)
            write_whole(path, json.dumps(resolved.ds_config, indent=2, default=str) + "\n")
        self._written = Path(str(self.distributed.broadcast_local(str(path))))
        self._global_batch_size = batch.global_batch_size
        # Determined divides by the slots, but replicas share the batch.
        self._per_slot_batch_size = batch.global_batch_size // batch.replicas
        if self._hparams is not None:
            named = self._written if self.decided_before is not None else None
            self._hparams = resolved.completed(self._hyperparameters.data, named)

    def adopt(self) -> None:
        """Replace the files of the run, once the model is built and its checkpoint loaded; a collective."""
        if self._written.parent != self._run_dir.next:
            return
        self.distributed.allgather(None)  # all ranks have read what is there
        if self.distributed.rank == 0 and self._run_dir.adopt_next():
            relink(self._run_dir)
        self._written = self._run_dir.deepspeed_config
        if self._hparams is not None and self.decided_before is not None:
            self._hparams["deepspeed_config"] = str(self._written)

    def stored_partition(self) -> str | None:
        """The text of ``partition.json`` of the checkpoint that training continues from, before the model is built.

        None where there is none; on a cluster, the partition of another trial is not taken. Fetches no other file. A
        collective.
        """
        found = None
        # What loads the checkpoint says what is wrong with it.
        with contextlib.suppress(OSError, CheckpointNotFound, CheckpointError, ConfigError):
            if self.distributed.rank == 0 and self.resumed_from is None:
                found = self._run_dir.partition.read_text()
            elif self.distributed.rank == 0 and self.resumed_from is not None:
                uuid, info = find_checkpoint(self, self.resumed_from), cluster_info()
                mode, wanted = core.DownloadMode.NoSharedDownload, (PARTITION, STATE)
                with self._core.checkpoint.restore_path(uuid, mode, selector=wanted.__contains__) as path:
                    text = (Path(path) / PARTITION).read_text()
                    if info is None or info.trial.trial_id == read_state(Path(path)).trial_id:
                        found = text
        return self.distributed.broadcast(found)  # type: ignore[no-any-return]

    def keep_partition(self, text: str) -> None:
        """Keep a partition in the run directory and in each checkpoint."""
        self.partition = text
        if self.distributed.rank == 0:
            folder = self._run_dir.current(self._run_dir.path)
            make_private(folder)
            write_whole(RunDir(folder).partition, text)

    def _init_device(self) -> None:
        self.device = torch.device("cpu")
        if self._accelerator.name == "cuda":
            self.device = torch.device("cuda", self.distributed.get_local_rank())
            torch.cuda.set_device(self.device)

    def wrap_mpu(self, mpu: det_ds.ModelParallelUnit) -> det_ds.ModelParallelUnit:
        """Set the model-parallel unit, before or after ``wrap_model_engine``.

        Args:
            mpu: E.g. ``DeepSpeedMPU(engine.mpu)``.

        Returns:
            ``mpu`` itself.

        Raises:
            ConfigError: one was set before, or it counts other replicas than the engine.
        """
        if self._called_set_mpu:
            raise refused("context.wrap_mpu", "was called twice: a trial has one MPU", "call it once", "mpu")
        self._called_set_mpu, self._mpu = True, mpu
        self._check_mpu()
        return mpu

    def set_mpu(self, mpu: det_ds.ModelParallelUnit) -> None:
        """Set the model-parallel unit, as :meth:`wrap_mpu`, by Determined's name."""
        self.wrap_mpu(mpu)

    def wrap_model_engine(self, model: Any) -> Any:
        """Register a DeepSpeed engine. See Determined's method of this name.

        Args:
            model: What ``deepspeed.initialize`` returned first.

        Returns:
            The engine.

        Raises:
            ConfigError: the context was opened for another kind of engine.
        """
        if self.engine != engine_name(model):
            message = f"the trial wraps an engine of {engine_name(model)}, which would train instead"
            fix = f"leave {self.engine} out, or make the engine with ReconciledTrial.initialize"
            raise refused("engine", message, fix, "engine", value=self.engine)
        chosen, is_own = self._mpu if self._called_set_mpu else None, model in ENGINES
        engine = super().wrap_model_engine(model)
        fix_engine(engine)
        is_first = len(self.models) == 1
        if isinstance(engine, PipelineEngine) and engine.is_model_parallel:
            # Each rank of a stage reads the same batches; Determined's unit expects that one hands them on.
            self._mpu.should_build_data_loader = engine.is_first_stage() or engine.is_last_stage()
        if isinstance(engine, PlannedEngine) and not engine.loads_data:
            self._mpu.should_build_data_loader = False  # Determined's unit has the last part on the last rank
        if chosen is not None:
            self._mpu = chosen
        elif degree_of(engine) > 1 or (is_first and getattr(engine, "sequence_parallel_size", 1) > 1):
            self._mpu = DeepSpeedMPU(engine.mpu)
        if isinstance(engine, DeepSpeedEngine) and is_first and not is_own:
            self._agree(engine)
        self._check_mpu()
        return engine

    def _agree(self, engine: Any) -> None:
        """Go by the engine that the trial made; refuse what it has otherwise, and what only a PipelineTrial does."""
        is_piped, before = isinstance(engine, PipelineEngine), self.decided_before
        batch_sizes = {key: int(getattr(engine._config, key)) for key in BATCH_KEYS}
        ds = Document(name=MADE, data={**as_plain(engine._config._param_dict), **batch_sizes})
        ranks, sequence = self.distributed.size, int(engine.sequence_parallel_size)
        pipe = int(engine.grid.get_pipe_parallel_world_size()) if is_piped else 1
        # With DeepSpeed's unit of sequence parallelism, the engine knows no replicas.
        replicas = int(engine.dp_world_size or ranks // sequence)
        layout = Topology(
            pipe_parallel_size=pipe,
            model_parallel_size=max(1, ranks // (pipe * replicas * sequence)),
            sequence_parallel_size=sequence,
            data_parallel_world_size=replicas,
        )
        hyperparameters = by_real_names(self._hyperparameters)[0]
        given = hyperparameters.data
        made = {name: getattr(layout, name) for name in SIZES if name != "global_batch_size"}
        made |= {name: ds.get(path) for name, path in SHORTHANDS.items()}
        made |= {"global_batch_size": ds.data["train_batch_size"], "zero_stage": made["zero_stage"] or 0}
        differs = [name for name, value in made.items() if given.get(name) not in (None, AUTO, value)]
        wrong = {name: f"has {shown(made[name])}" for name in differs}
        if not is_piped or engine.num_stages > 1:  # else there is nothing to order or divide
            is_planned, schedule = isinstance(engine, PlannedEngine), given.get("pipe_schedule")
            is_within = is_piped and engine.grid.topology().get_axis_names()[0] == "data"
            is_divided = getattr(engine.module, "bounds", None) is not None
            unread = {
                "pipe_schedule": not is_planned and schedule not in (None, AUTO, ONE_F_ONE_B),
                "pipe_within_machine": bool(given.get("pipe_within_machine")) and not is_within,
                "partition_method": given.get("partition_method") == MEASURED and not is_divided,
            }
            without = "was made without it, which a determined_ds.PipelineTrial reads"
            wrong |= {name: without for name in unread if unread[name]}
        fix = "leave it out, or initialize the engine with config=context.resolved.ds_config"
        problems = [
            hyperparameters.problem((name,), f"{MADE} {said}", fix, "engine-config")
            for name, said in wrong.items()
        ]
        stated = before.stated.data if before and given.get("deepspeed_config") is not None else {}
        if before and stated and layout == before.topology:
            problems += [
                before.stated.problem((key,), f"{MADE} has {ds.data[key]}", fix, "engine-config")
                for key, name in BATCH_KEYS.items()
                if ds.data[key] != getattr(before.batch, name)
            ]
        if problems:
            raise ConfigError(problems)
        if before is not None and ds.data == before.ds_config:
            return
        own = {name: given[name] for name in KEPT if name in given}
        own |= {name: getattr(layout, name) for name in PARALLEL_SIZES}
        found = reconcile(
            replace(hyperparameters, data=own),
            ds,
            slots=layout.slots,
            accelerator=self._accelerator,
            machines=self.distributed.cross_size,
        )
        if self.distributed.rank == 0:
            for warning in found.warnings:
                if before is None or warning not in before.warnings:
                    logger.warning("%s", warning)
            otherwise = [
                f"{dotted(path)} {shown(ds.get(path))} instead of {shown(value)}"
                for path, value in leaves(stated)
                if value not in (AUTO, ds.get(path)) and path[0] not in BATCH_KEYS
            ]
            if otherwise:
                logger.warning("the engine was made with %s of deepspeed_config", ", ".join(otherwise))
        # Nothing is filled in: the engine exists.
        self._decide(replace(found, ds=found.stated, hyperparameters=hyperparameters))

    def _check_mpu(self) -> None:
        """Refuse a model-parallel unit whose replicas are not those that the engine averages over."""
        if not self.models or not isinstance(self._resolved, ResolvedConfig):
            return
        stated, replicas = self._mpu.data_parallel_world_size, self._resolved.batch.replicas
        if stated != replicas:
            message = f"the engine averages gradients over {replicas} replica{'s' * (replicas != 1)}"
            fix = "make the unit from engine.mpu, or give the engine the same: deepspeed.initialize(mpu=...)"
            raise refused("mpu.data_parallel_world_size", message, fix, "mpu", value=stated)

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """The metrics of the custom reducers over all ranks, as they can be reported; a collective."""
        kind = "for_training" if for_training else "for_validation"
        reducables = [each for each in self._wrapped_reducers if getattr(each, kind)]
        if not reducables:
            return {}
        # As Determined's method of that name, but ranks that compute the same as another count once.
        counts = not any(is_copy(engine) for engine in self.models)
        slots = [[each.per_slot_reduce() for each in reducables]] if counts else []
        gathered = [slot for rank in self._allgather_fn(slots) for slot in rank]
        try:
            metrics = self.run_cross_slot_reduction(reducables, gathered)
        except AssertionError as error:  # Determined's, of a reducer that returned a dict, or should have
            raise TrainingError(str(error)) from error
        return plain(metrics or {}, "a reducer of context.wrap_reducer", for_training=for_training)

    def to_device(self, data: Any) -> Any:
        """Move a batch to the device.

        Args:
            data: Tensors and arrays, in lists, tuples and mappings of any depth.

        Returns:
            The same structure, its tensors and arrays on the device.
        """
        return moved(data, self.device)
