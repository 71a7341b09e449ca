"""What a checkpoint holds besides the engines: where training stands, and each rank's own part.

A rank's part has its generators, callbacks, custom reducers, unreported sums and position in the data.

1. A rank writes its part with its place: which replica it holds, and which of that replica's ranks it is.
2. Ranks in the places of those that wrote read their own parts, bit for bit.
3. Other ranks read all parts: nothing of the old ranks is lost, and nothing doubled. Generators, callbacks and a
   script's objects follow the replica; the position in the data is the same on every replica. Metrics and custom
   reducers begin anew.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from determined_ds.checkpoints.engine_slices import owners_of
from determined_ds.checkpoints.engines import overrides, together
from determined_ds.checkpoints.files import (
    DATA_FIX,
    LOAD_DATA,
    PART,
    STATE,
    THEIR_STATE,
    data_refusal,
    elastic_refusal,
    written_by,
)
from determined_ds.checkpoints.safe_load import check_loadable, check_state, read_data, serialized
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.experiment.secrets import masked
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.rundir.handed_on import count
from determined_ds.train.data.samples import APART
from determined_ds.train.data.seeds import SEED, mixed_seed
from determined_ds.trial.author import method_of
from determined_ds.trial.tensor_parallel import degree_of

logger = logging.getLogger("determined_ds")

FIX = "resume from another checkpoint, or copy its files again"

# ------------------------------------------------------------------------------------------- where training stands


@dataclass(kw_only=True)
class TrialState:
    """Where training stands."""

    trial_id: int = 0  # the trial that wrote it; another trial that starts from it counts from 0
    batches_trained: int = 0  # optimizer steps since the start of training
    epochs_trained: int = 0  # whole epochs among them
    last_validation: int = -1  # batches_trained at the last validation
    last_checkpoint: int = -1  # batches_trained at the last checkpoint
    kept: list[str] = field(default_factory=list)  # uuids of the existing checkpoints, oldest first
    best: str = ""  # uuid of the one whose validation was best


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{THEIR_STATE} names {module}.{name}")


def read_state(path: Path, uuid: str) -> TrialState:
    """Where training stood, from our own file or that of Determined's loop."""
    try:
        if (path / STATE).exists():
            found = json.loads((path / STATE).read_text())
        else:
            with (path / THEIR_STATE).open("rb") as file:
                found = _PlainUnpickler(file).load()
            found |= {"last_validation": found["last_val"], "last_checkpoint": found["last_ckpt"]}
        if "batches_trained" not in found:
            raise ValueError("it does not say batches_trained")
        return TypeAdapter(TrialState).validate_json(json.dumps(found), strict=True)
    except FileNotFoundError:
        message = f"checkpoint {uuid} has no {STATE}: it was not written by a DeepSpeedTrial"
    except ValidationError as error:
        first = error.errors()[0]
        message = f"checkpoint {uuid} says {first['loc'][0]} = {first['input']!r} of where training stood"
    except (OSError, ValueError, EOFError, TypeError, KeyError, pickle.UnpicklingError) as error:
        message = f"where training stood in checkpoint {uuid} cannot be read: {error}"
    raise CheckpointError(f"{message}\n  fix: {FIX}")


# ------------------------------------------------------------------------------------------- a rank's place


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands. Ranks in equal places hold the same layers, and so have read the same data."""

    rank: int
    ranks: int
    replica: int  # the data-parallel copy that it holds, or a part of
    replicas: int
    member: int  # which of the ranks that hold the replica, such as its pipeline stage
    members: int
    owners: tuple[tuple[int, ...], ...] = ()  # of each engine, which stage of its pipeline holds each layer
    copies: int = 1  # neighbouring ranks that compute the same losses; the first counts (tensor parallel)
    calls: int = field(compare=False)  # training metrics of an optimizer step, over all replicas
    micro_batch_size: int = field(compare=False)  # samples of a replica in a forward pass


class RankParts:
    """Writes and reads the parts of ranks.

    Args:
        trial: Its ``load`` may be its own.
        context: The trial's.
        callbacks: Name -> callback, whose states are in a part.
    """

    def __init__(self, trial: Any, context: Any, callbacks: Mapping[str, Any]) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._was_read_back = False

    @cached_property
    def here(self) -> RankPlace:
        """The place of this rank; the first call is a collective."""
        context = self._context
        distributed, mpu, batch = context.distributed, context._mpu, context.resolved.batch
        holds = distributed.allgather(mpu.data_parallel_rank)
        rank, replica = distributed.rank, mpu.data_parallel_rank
        in_one_call = context.use_pipeline_parallel or context._manual_grad_accumulation
        return RankPlace(
            rank=rank,
            ranks=distributed.size,
            replica=replica,
            replicas=mpu.data_parallel_world_size,
            member=holds[:rank].count(replica),
            members=holds.count(replica),
            owners=tuple(owners_of(engine) for engine in context.models),
            copies=max((degree_of(engine) for engine in context.models), default=1),
            calls=mpu.data_parallel_world_size * (1 if in_one_call else batch.accumulation),
            micro_batch_size=batch.micro_batch_size,
        )

    # ------------------------------------------------------------------------------------- written

    def state_files(self, state: TrialState, own_layout: str, data: Any) -> dict[str, bytes]:
        """Name -> content of the files that describe the state and the trial, without secrets.

        ``load_data.json`` is as in Determined's own checkpoints, with the seed, the DeepSpeed configuration and the
        ranks (see :func:`~determined_ds.checkpoints.files.written_by`) added.

        Args:
            state: Where training stands.
            own_layout: Why only the same layout can read it, or "".
            data: Has the position in the training data; None where there are none.
        """

        def stated(getter: Callable[[], Any]) -> Any:
            try:
                return getter()
            except ValueError:  # a script that opened its context without any
                return None

        context, kind = self._context, type(self._trial)
        config, hparams = stated(context.get_experiment_config), stated(context.get_hparams)
        load_data = {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": config and masked(config),
            "hparams": hparams and masked({"hyperparameters": hparams})["hyperparameters"],
            "deepspeed_config": masked({"deepspeed_config": context.resolved.ds_config})["deepspeed_config"],
            "trial_seed": context.get_trial_seed(),
            "written_by": {
                "ranks": self.here.ranks,
                "replicas": self.here.replicas,
                "micro_batch_size": self.here.micro_batch_size,
                "engine": context.engine,
                "own_layout": own_layout or None,
                "data_apart": getattr(data, "apart", None),
            },
            "trial_cls_spec": getattr(self._trial, "class_spec", f"{kind.__module__}:{kind.__qualname__}"),
            "is_trainer": True,
        }
        files = {STATE: json.dumps(asdict(state)) + "\n", LOAD_DATA: json.dumps(load_data) + "\n"}
        if (partition := getattr(context, "partition", None)) is not None:
            files[PARTITION] = partition
        return {name: text.encode() for name, text in files.items()}

    def taken(self, part: dict[str, Any], *, at_once: bool) -> Callable[[], memoryview]:
        """What gives this rank's part as bytes: called now or, with a copy of the part, in another thread.

        The first one is made now, and tried for whether it can be read back.
        """
        if self._was_read_back and not at_once:
            try:
                kept = copy.deepcopy(part)
                return lambda: self._serialized(kept).getbuffer()
            except Exception:  # what cannot be copied is written now, or refused with its owner's name
                pass
        file = self._serialized(part)
        if not self._was_read_back:
            check_loadable(file)
            self._was_read_back = True
        return file.getbuffer

    def _serialized(self, part: dict[str, Any]) -> io.BytesIO:
        try:
            return serialized(part)
        except (TypeError, AttributeError, pickle.PicklingError):
            for name, callback in self._callbacks.items():
                owner = f"callback {name!r}: {method_of(callback, 'state_dict')}"
                check_state(owner, part["callbacks"].get(name))
            check_state("on_checkpoint_save_start of a callback", part)
            raise

    # ------------------------------------------------------------------------------------- read

    def read(self, path: Path, uuid: str, *, batch: int) -> tuple[dict[str, Any], str]:
        """This rank's part, and a line to show where other ranks wrote it; a collective.

        Args:
            path: The checkpoint's folder.
            uuid: Its name.
            batch: Batches trained when it was written.
        """
        here, distributed = self.here, self._context.distributed
        reason = elastic_refusal(path)
        if reason is None and overrides(self._trial, "load"):
            reason = f"{method_of(self._trial, 'load')} decides itself what is read"
        if self._context.resets_optimizer and reason is not None:
            message = f"the optimizer's state of checkpoint {uuid} cannot be left out: {reason}"
            fix = "leave the option out; or start a new run from the weights: "
            fix += "--set searcher.source_checkpoint_uuid=CHECKPOINT"
            raise ConfigError(
                Problem(key="--reset-optimizer", message=message, fix=fix, code="reset-optimizer")
            )
        num_written = len(list(path.glob(PART.format("*"))))
        if not any(distributed.allgather(num_written or (path / LOAD_DATA).is_file())):  # it was imported
            return {}, ""
        num_written = max(1, num_written)  # one that is missing is named when it is read
        same_number = num_written == here.ranks
        own = together(distributed, lambda: self._part(path, here.rank) if same_number else {})
        # Determined's own loop writes no place.
        then = RankPlace(**own["place"]) if "place" in own else None
        if all(distributed.allgather(bool(own) and then in (None, here))):
            if then is not None:
                own["parts"] = dict(own.get("parts", {}))
                if own["parts"].get("data"):  # the micro-batch may have changed
                    own["parts"]["data"] = self._position([own["parts"]["data"]], [then])
                if then.calls != here.calls:  # then a step adds another number of losses
                    own["parts"].pop("metrics", None)
            return own, ""
        if reason is not None:
            raise CheckpointError(
                f"checkpoint {uuid} was written by {count(num_written, 'rank')}, and these are {here.ranks}, or hold "
                f"other parts of the model; only those can read it: {reason}\n  fix: resume with {num_written} slots, "
                "and the pipeline and model-parallel sizes that wrote it"
            )
        part = together(distributed, lambda: self._joined(path, num_written, batch))
        before = written_by(path)
        words = f" ({count(before['replicas'], 'replica')}, {before['engine']})" if before else ""
        was = count(num_written, "rank") + words
        now = f"{count(here.ranks, 'rank')} ({count(here.replicas, 'replica')}, {self._context.engine})"
        changed = f"{now}, with other layers of the pipeline each" if was == now else f"{was} -> {now}"
        return part, f"elastic     {changed}; training metrics since the last report begin anew"

    def _part(self, path: Path, rank: int, *, on_host: bool = False) -> dict[str, Any]:
        """A rank's part, its tensors on this rank's device where they were on the other's."""
        device = self._context.device

        def placed(storage: Any, location: str) -> Any:
            # A reducer adds up on the device of its batches: on the host, its next addition would fail.
            return storage.to(device=device) if location.startswith(device.type) and not on_host else storage

        file = path / PART.format(rank)
        part = read_data(file, map_location=placed, **({"mmap": True} if on_host else {}))
        if not isinstance(part, dict):
            message = f"checkpoint {path.name}: {file.name} does not hold the part of a rank"
            raise CheckpointError(f"{message}\n  fix: {FIX}")
        return part

    def _joined(self, path: Path, num_written: int, batch: int) -> dict[str, Any]:
        """The part of this rank, out of the parts of all ranks that wrote a checkpoint."""
        here = self.here
        old = [self._part(path, rank, on_host=True) for rank in range(num_written)]
        places = [RankPlace(**part["place"]) for part in old]
        # The old rank that held the same replica, of several that with the same part of it.
        held = [place for place in places if place.replica == here.replica]
        same = [place for place in held if (place.member, place.members) == (here.member, here.members)]
        counterpart = next((place.rank for place in (*same, *held)), None)
        kept = self._part(path, counterpart or 0)
        del kept["place"]
        begin_anew = {"parts": ("metrics", "reducers", "data")}
        for kind, owner in (("callbacks", "callback"), ("parts", "the state of")):
            for name in begin_anew.get(kind, ()):
                kept[kind].pop(name, None)
            for name, state in kept[kind].items():
                if not all(_is_equal(state, part[kind][name]) for part in old if name in part[kind]):
                    logger.warning(
                        "warning: %s %r differed between the ranks that wrote the checkpoint, and the ranks are others "
                        "now: that of the same replica, or of rank 0, is kept",
                        owner,
                        name,
                    )
        kept["parts"]["data"] = self._position([part["parts"].get("data") or {} for part in old], places)
        if counterpart is None:  # a further replica: a seed that none had before
            kept["rng_state"] = {SEED: mixed_seed(self._context.get_trial_seed(), here.replica, batch)}
        return kept

    def _position(self, states: Sequence[Mapping[str, Any]], places: Sequence[RankPlace]) -> dict[str, Any]:
        """The position in the training data, which ranks without a data loader do not have."""
        here, pairs = self.here, zip(reversed(places), reversed(states), strict=True)
        found = {place.replica: state for place, state in pairs if state}
        if not found:
            return {}
        state = found.get(here.replica) or found[min(found)]
        written = {**vars(places[0]), "data_apart": state.get(APART)}
        if reason := data_refusal(written, replicas=here.replicas, micro_batch_size=here.micro_batch_size):
            raise CheckpointError(f"{reason}\n  fix: {DATA_FIX}")
        return dict(state)


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two states are the same, to the last bit, on whichever device."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
    # The repr of a large array leaves out most of it.
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return bool(repr(first) == repr(second))
