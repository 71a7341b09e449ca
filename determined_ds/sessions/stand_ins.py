"""What stands for a script where the loop expects a trial: its data, its validations, its part of a checkpoint.

A script iterates passes over the training data, which drive it, and shares of the validation data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.checkpoints.safe_load import check_state
from determined_ds.checkpoints.settings import records_of
from determined_ds.errors import CheckpointError, DataError, Problem
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.loaders import drawn_for, with_batch_sampler
from determined_ds.train.data.samples import Share
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.loop.validation import evaluating
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.returned import refused
from determined_ds.trial.stream_loader import StreamLoader

if TYPE_CHECKING:
    from determined_ds.sessions.session import Session


class TrainingBatches:
    """The training data of a script: iterate it once for each pass."""

    def __init__(self, session: Session, make: Callable[[], Any], dataset: Any) -> None:
        self._session, self._make, self.dataset = session, make, dataset

    @functools.cached_property
    def loader(self) -> Any:
        """The loader that is read, made once the batch is known."""
        return self._make()

    def __len__(self) -> int:
        """Micro-batches of this rank in a pass."""
        loader, batch = self.loader, self._session.resolved.batch
        if isinstance(loader, StreamLoader):
            length = loader.length()
            if length is None:
                raise TypeError("the training data has no length, and so has its loader")
            steps = length // (batch.global_batch_size // (batch.replicas if loader.sharded else 1))
        elif type(loader.batch_sampler) is torch_data.BatchSampler:
            steps = len(loader.batch_sampler.sampler) // batch.global_batch_size  # type: ignore[arg-type]
        else:
            steps = len(loader.batch_sampler) // (batch.accumulation * batch.replicas)
        return steps * batch.accumulation

    def __iter__(self) -> Iterator[Any]:
        return self._session._one_pass()


class ValidationData:
    """The validation data of a script: a replica's share of it, as many batches on each.

    Every sample is in one share, so a mean over what all ranks report, weighted by samples, is the mean over all. Data
    without an index, and data with a batch sampler of its own, is read whole by every replica.
    """

    def __init__(self, session: Session, make: Callable[[], Any], dataset: Any) -> None:
        self._session, self._make, self.dataset = session, make, dataset

    def __len__(self) -> int:
        """Batches of this rank."""
        if self._share[1] is None:
            raise TypeError("the validation data has no length, and so has its loader")
        return len(self._share[1])

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        session._driven("iterating the validation loader")
        session._pause()
        batches, sizes = self._share
        pipelines = session.context.models if session.context.use_pipeline_parallel else []
        loads = session.context._mpu.should_build_data_loader
        with evaluating(pipelines) if pipelines else contextlib.nullcontext():
            for engine in pipelines:
                engine.micro_batches = 1
            for number, batch in enumerate(batches):
                HEART.beat()
                session._validated += sizes[number] if sizes is not None else 0
                yield (iter([batch]) if loads else None) if pipelines else batch

    @functools.cached_property
    def _share(self) -> tuple[Any, list[int] | None]:
        """The batches of this replica, and the samples in each, None where that is not known.

        Under ZeRO 3 a forward pass is a collective, so replicas make the same number of them.
        """
        mpu, seed, loader = self._session.context._mpu, self._session.context.get_trial_seed(), self._make()
        sampler = loader.batch_sampler if isinstance(loader, pytorch.DataLoader) else None
        if type(sampler) is not torch_data.BatchSampler:
            whole = Share(loader, length_of=len, replica=0, replicas=1, seed=seed)
            return whole, whole.sizes
        with drawn_for(sampler, seed, 0):
            order = [sample for batch in sampler for sample in batch]
        if not order:
            message, fix = "the validation data has no sample", "use more validation data"
            raise DataError(
                Problem(key="s.validation_loader", message=message, fix=fix, code="too-little-data")
            )
        replicas = mpu.data_parallel_world_size if len(order) >= mpu.data_parallel_world_size else 1
        own = order[mpu.data_parallel_rank % replicas :: replicas]
        largest = -(-len(order) // replicas)
        count = min(-(-largest // sampler.batch_size), len(order) // replicas)
        cuts = [len(own) * index // count for index in range(count + 1)]
        batches = [own[start:end] for start, end in itertools.pairwise(cuts)]
        return with_batch_sampler(loader, batches, 0), [len(batch) for batch in batches]


class ScriptTrial(ReconciledTrial):
    """A trial whose engines the script has built, and whose steps it takes; ``loader`` is its training data."""

    loader: Any = None
    class_spec = ""  # in a checkpoint: no class builds the model

    def __init__(self, context: Any) -> None:
        self.context: Any = context

    @property
    def resolved(self) -> Any:  # type: ignore[override]
        """What was decided, or adopted from the first engine."""
        return self.context.resolved

    def build_training_data_loader(self) -> Any:
        """The script's."""
        if self.loader is None:
            fix = "call loader = s.loader(dataset) before the first step"
            raise refused("s.loader", "there is no training data", fix, "session")
        return self.loader.loader

    # The script does it.
    build_model = build_validation_data_loader = train_batch = evaluate_batch = None  # type: ignore[assignment]


class ReportedValidation:
    """The metrics of a validation that a script reports, in place of a validation that the loop runs."""

    def __init__(self, context: Any) -> None:
        self._sums = MetricSums(context.device, source="s.report")
        self.is_pending = False

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add what a rank reports; ``weight``: samples that the values are means over."""
        self._sums.add(metrics, weight)
        self.is_pending = True

    def run(self, _callbacks: list[Any]) -> dict[str, Any]:
        """The means over what all ranks have reported; a collective."""
        self.is_pending = False
        return dict(self._sums.reduce()[0])


class ScriptState:
    """A script's part of each checkpoint: its objects by name, and the passes that are done."""

    def __init__(self, training: Any, objects: Mapping[str, Any]) -> None:
        self._training, self._objects = training, dict(objects)
        self._loaded: Mapping[str, Any] = {"passes": 0, "states": {}}

    @property
    def passes(self) -> int:
        """Passes over the data that were done when the loaded checkpoint was written."""
        return int(self._loaded["passes"])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        states = {name: each.state_dict() for name, each in self._objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        per_pass = self._training.schedule.batches_per_epoch
        return {
            "passes": self._training.state.batches_trained // per_pass if per_pass else 0,
            "states": states,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the objects."""
        self._loaded = dict(state_dict)
        then, now = sorted(self._loaded["states"]), sorted(self._objects)
        if then != now:
            raise CheckpointError(
                f"the checkpoint holds the states {then}, and s.checkpoint is given the objects {now}\n"
                "  fix: give s.checkpoint the same objects by the same names, or start anew in another run directory"
            )
        self.restore_objects()

    def restore_objects(self) -> None:
        """Set each object of the script to what the checkpoint holds."""
        for name, state in self._loaded["states"].items():
            self._objects[name].load_state_dict(copy.deepcopy(state))


def engine_marks(engines: list[Any]) -> Any:
    """What differs once anything has changed weights, optimizer settings or a schedule of an engine."""
    records = [{key: each[key] for key in ("groups", "scheduler")} for each in records_of(engines)]
    weights = [each for engine in engines for each in engine.module.parameters()]
    return records, [getattr(each, "ds_tensor", each)._version for each in weights]


def sums_of_weights(engines: list[Any]) -> dict[str, float]:
    """What a tested checkpoint is proved by."""
    return {
        f"{index}/{name}": float(getattr(parameter, "ds_tensor", parameter).detach().double().sum())
        for index, engine in enumerate(engines)
        for name, parameter in engine.module.named_parameters()
    }
