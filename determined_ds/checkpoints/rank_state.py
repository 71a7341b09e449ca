"""What a checkpoint holds besides the engines: where training stands, and each rank's own part.

A rank's part has its generators, callbacks, custom reducers, unreported sums and position in the data.

1. A rank writes its part with its place: which replica it holds, and which of that replica's ranks it is.
2. Ranks in the places of those that wrote read their own parts, bit for bit.
3. Other ranks read all parts: nothing of the old ranks is lost, and nothing doubled. Generators, callbacks and a
   script's objects follow the replica; the position in the data is the same on every replica. Metrics and custom
   reducers begin anew.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.engine_slices import owners_of
from determined_ds.checkpoints.engines import overrides
from determined_ds.checkpoints.files import (
    DATA_FIX,
    LOAD_DATA,
    apart_refusal,
    elastic_refusal,
    written_by,
)
from determined_ds.checkpoints.safe_load import another_model, check_loadable, check_state, read_data
from determined_ds.checkpoints.settings import Record, misfit, union_of
from determined_ds.errors import CheckpointError
from determined_ds.experiment.secrets import masked
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.rundir.handed_on import count
from determined_ds.train.data.samples import APART
from determined_ds.train.data.seeds import SEED, mixed_seed
from determined_ds.trial.author import method_of
from determined_ds.trial.tensor_parallel import degree_of

logger = logging.getLogger("determined_ds")

STATE = "trial_state.json"
FIX = "resume from another checkpoint, or copy its files again"
Part = Mapping[str, Any]

# ------------------------------------------------------------------------------------------- where training stands


@dataclass(kw_only=True)
class TrialState:
    """Where training stands.

    Args:
        trial_id: The trial that wrote it; another trial that starts from it counts from 0.
        batches_trained: Optimizer steps since the start of training.
        epochs_trained: Whole epochs among them.
        last_validation: ``batches_trained`` at the last validation.
        last_checkpoint: ``batches_trained`` at the last checkpoint.
        kept: Uuids of the existing checkpoints, oldest first.
        best: Uuid of the one whose validation was best.
    """

    trial_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
    last_validation: int = -1
    last_checkpoint: int = -1
    kept: list[str] = field(default_factory=list)
    best: str = ""


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"trial_state.pkl names {module}.{name}")


def read_state(path: Path, uuid: str) -> TrialState:
    """Where training stood, from our own file or that of Determined's loop.

    Raises:
        CheckpointError: the checkpoint has neither.
    """
    try:
        if (path / STATE).exists():
            found = json.loads((path / STATE).read_text())
        else:
            with (path / "trial_state.pkl").open("rb") as file:
                found = _PlainUnpickler(file).load()
            theirs = {"last_validation": "last_val", "last_checkpoint": "last_ckpt"}
            found = {**found, **{name: found.get(own, -1) for name, own in theirs.items()}}
    except FileNotFoundError:
        message = f"checkpoint {uuid} has no {STATE}: it was not written by a DeepSpeedTrial"
        raise CheckpointError(f"{message}\n  fix: {FIX}") from None
    except (OSError, ValueError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"where training stood in checkpoint {uuid} cannot be read: {error}\n  fix: {FIX}"
        ) from None
    defaults = asdict(TrialState())
    known = {name: found[name] for name in defaults if isinstance(found, dict) and name in found}
    odd = [name for name, value in known.items() if not isinstance(value, type(defaults[name]))]
    if odd or "batches_trained" not in known:
        name = odd[0] if odd else "batches_trained"
        raise CheckpointError(
            f"checkpoint {uuid} says {name} = {known.get(name)!r} of where training stood\n  fix: {FIX}"
        )
    return TrialState(**known)


def state_files(trial: Any, context: Any, state: TrialState, by: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the files that describe the state and the trial, without secrets.

    ``load_data.json`` is as in Determined's own checkpoints, with the seed and the DeepSpeed configuration added.

    Args:
        trial: The trial.
        context: Its context.
        state: Where training stands.
        by: The ranks, see :func:`~determined_ds.checkpoints.files.written_by`.
    """

    def stated(getter: Callable[[], Any]) -> Any:
        try:
            return getter()
        except ValueError:  # a script that opened its context without any
            return None

    config, hparams = stated(context.get_experiment_config), stated(context.get_hparams)
    kind = type(trial)
    load_data = {
        "trial_type": "DeepSpeedTrial",
        "experiment_config": config and masked(config),
        "hparams": hparams and masked({"hyperparameters": hparams})["hyperparameters"],
        "deepspeed_config": masked({"deepspeed_config": context.resolved.ds_config})["deepspeed_config"],
        "trial_seed": context.get_trial_seed(),
        "written_by": dict(by),
        "trial_cls_spec": getattr(trial, "class_spec", f"{kind.__module__}:{kind.__qualname__}"),
        "is_trainer": True,
    }
    files = {STATE: json.dumps(asdict(state)) + "\n", LOAD_DATA: json.dumps(load_data) + "\n"}
    partition = getattr(context, "partition", None)
    return files if partition is None else {**files, PARTITION: partition}


# ------------------------------------------------------------------------------------------- a rank's place


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands.

    Args:
        rank: Which.
        ranks: How many there are.
        replica: The data-parallel copy that it holds, or a part of.
        replicas: How many there are.
        member: Which of the ranks that hold the replica, such as its pipeline stage.
        members: How many hold it.
        calls: Training metrics of an optimizer step, over all replicas.
        micro_batch_size: Samples of a replica in a forward pass.
        owners: Of each engine, which stage of its pipeline holds each layer; empty where a checkpoint does not say.
        copies: Neighbouring ranks that compute the same losses, of which the first counts (tensor parallel).
    """

    rank: int
    ranks: int
    replica: int
    replicas: int
    member: int
    members: int
    calls: int
    micro_batch_size: int
    owners: tuple[tuple[int, ...], ...] = ()
    copies: int = 1

    @staticmethod
    def of(context: Any) -> RankPlace:
        """The place of this rank; a collective."""
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
            calls=mpu.data_parallel_world_size * (1 if in_one_call else batch.accumulation),
            micro_batch_size=batch.micro_batch_size,
            owners=tuple(owners_of(engine) for engine in context.models),
            copies=max((degree_of(engine) for engine in context.models), default=1),
        )

    def holds_same(self, other: RankPlace) -> bool:
        """Whether the rank that wrote ``other`` held the same layers, and so read the same data.

        One that does not say which it held was of a pipeline with one part a rank.
        """
        mine, theirs = (
            (each.rank, each.ranks, each.replica, each.replicas, each.member, each.members, each.copies)
            for each in (self, other)
        )
        is_plain = all(list(owners) == sorted(owners) for owners in self.owners)
        return mine == theirs and (self.owners == other.owners or (not other.owners and is_plain))


class RankParts:
    """Writes and reads the parts of ranks.

    Args:
        trial: That may read checkpoints itself.
        context: Of the trial.
        callbacks: Name -> callback.
    """

    def __init__(self, trial: Any, context: Any, callbacks: Mapping[str, Any]) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._here: RankPlace | None = None
        self._was_read_back = False

    @property
    def here(self) -> RankPlace:
        """The place of this rank; the first call is a collective."""
        if self._here is None:
            self._here = RankPlace.of(self._context)
        return self._here

    def written_by(self, own_layout: str, data: Any) -> dict[str, Any]:
        """Who writes a checkpoint, see :func:`~determined_ds.checkpoints.files.written_by`.

        Args:
            own_layout: Why only the ranks that write the engines can read them; "" where others can, too.
            data: The part of the training data, which may have a position on each replica.
        """
        return {
            "ranks": self.here.ranks,
            "replicas": self.here.replicas,
            "micro_batch_size": self.here.micro_batch_size,
            "engine": self._context.engine,
            "own_layout": own_layout or None,
            "data_apart": getattr(data, "apart", None),
        }

    def write(self, part: dict[str, Any], file: Path | io.BytesIO) -> None:
        """Write this rank's part; the first one is also tried for whether it can be read back.

        Raises:
            CheckpointError: it holds what cannot be written or read; names its owner.
        """
        try:
            torch.save(part, file)
        except (TypeError, AttributeError, pickle.PicklingError):
            for name, callback in self._callbacks.items():
                owner = f"callback {name!r}: {method_of(callback, 'state_dict')}"
                check_state(owner, part["callbacks"].get(name))
            check_state("on_checkpoint_save_start of a callback", part)
            raise
        if not self._was_read_back:
            if isinstance(file, io.BytesIO):
                file.seek(0)
            check_loadable(file, part, self._callbacks)
            self._was_read_back = True

    def read(self, path: Path, uuid: str, *, batch: int) -> tuple[dict[str, Any], str]:
        """This rank's part; a collective.

        Args:
            path: The checkpoint's folder.
            uuid: Of the checkpoint, for messages.
            batch: Optimizer steps that it was trained for.

        Returns:
            The part; and a line for people where other ranks wrote the checkpoint than read it, "" where the same did.

        Raises:
            CheckpointError: a part cannot be read, or only by the ranks that wrote it.
        """
        here, distributed = self.here, self._context.distributed
        num_written = len(list(path.glob("det_state_dict_rank*.pth")))
        was_trained = num_written or (path / LOAD_DATA).is_file()
        if not any(distributed.allgather(was_trained)):  # it was imported
            return {}, ""
        num_written = max(1, num_written)  # the missing one is named when it is read
        device = self._context.device

        def placed(storage: Any, location: str) -> Any:
            # A reducer adds up on the device of its batches: on the host, its next addition would fail.
            return storage.to(device=device) if location.startswith(device.type) else storage

        same_number = num_written == here.ranks
        own = self._together(lambda: _read_part(path, here.rank, map_location=placed) if same_number else {})
        then = RankPlace(**own["place"]) if "place" in own else None
        if all(distributed.allgather(bool(own) and (then is None or here.holds_same(then)))):
            if then is not None:
                own["parts"] = dict(own.get("parts", {}))
                if own["parts"].get("data"):  # the micro-batch may have changed
                    own["parts"]["data"] = _position([own["parts"]["data"]], [then], here)
                if then.calls != here.calls:  # then a step adds another number of losses
                    own["parts"].pop("metrics", None)
            return own, ""
        reason = elastic_refusal(path)
        if reason is None and overrides(self._trial, "load"):
            reason = f"{method_of(self._trial, 'load')} decides itself what is read"
        if reason is not None:
            raise CheckpointError(
                f"checkpoint {uuid} was written by {count(num_written, 'rank')}, and these are {here.ranks}, or hold "
                f"other parts of the model; only those can read it: {reason}\n  fix: resume with {num_written} slots, "
                "and the pipeline and model-parallel sizes that wrote it"
            )
        part = self._together(lambda: self._joined(path, num_written, batch))
        before = written_by(path)
        words = f" ({count(before['replicas'], 'replica')}, {before['engine']})" if before else ""
        was = count(num_written, "rank") + words
        now = f"{count(here.ranks, 'rank')} ({count(here.replicas, 'replica')}, {self._context.engine})"
        changed = f"{now}, with other layers of the pipeline each" if was == now else f"{was} -> {now}"
        return part, f"elastic     {changed}; training metrics since the last report begin anew"

    def _together(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What this rank reads; where any rank cannot, all raise the same."""
        part: dict[str, Any] = {}
        failure = ""
        try:
            part = read()
        except CheckpointError as error:
            failure = str(error)
        if failures := [each for each in self._context.distributed.allgather(failure) if each]:
            raise CheckpointError(failures[0])
        return part

    def _joined(self, path: Path, num_written: int, batch: int) -> dict[str, Any]:
        """The part of this rank, out of the parts of all ranks that wrote a checkpoint."""
        here, device = self.here, self._context.device
        from_device: set[int] = set()  # storages; they stay on the host until one is chosen

        def on_host(storage: Any, location: str) -> Any:
            if device.type != "cpu" and location.startswith(device.type):
                from_device.add(storage.data_ptr())
            return storage

        old = [_read_part(path, rank, map_location=on_host, mmap=True) for rank in range(num_written)]
        # A rank that did not write its place held a replica.
        alone = {
            "ranks": num_written,
            "replicas": num_written,
            "member": 0,
            "members": 1,
            "calls": here.calls,
        }
        alone["micro_batch_size"] = here.micro_batch_size
        places = [
            RankPlace(**part.get("place", {"rank": rank, "replica": rank, **alone}))
            for rank, part in enumerate(old)
        ]
        # The old rank that held the same replica, of several that with the same part of it.
        held = [place for place in places if place.replica == here.replica]
        same = [place for place in held if (place.member, place.members) == (here.member, here.members)]
        counterpart = next((place.rank for place in (*same, *held)), None)
        nearest = old[counterpart or 0]
        kept = {name: state for name, state in nearest.items() if name not in ("place", "built")}
        kept["callbacks"], kept["parts"] = {}, {}
        for name, state in nearest["callbacks"].items():
            states = [part["callbacks"][name] for part in old if name in part["callbacks"]]
            takes_all = hasattr(self._callbacks.get(name), "load_whole")
            chosen = (
                OfAll(states=tuple(states)) if takes_all else _one_of(f"callback {name!r}", state, states)
            )
            kept["callbacks"][name] = _moved_back(chosen, from_device, device)
        for name, state in nearest["parts"].items():
            if name not in ("metrics", "reducers", "data"):
                states = [part["parts"][name] for part in old if name in part["parts"]]
                chosen = _one_of(f"the state of {name!r}", state, states)
                kept["parts"][name] = _moved_back(chosen, from_device, device)
        kept["parts"]["data"] = _position([part["parts"].get("data") or {} for part in old], places, here)
        if counterpart is None:  # a further replica: a seed that none had before
            kept["rng_state"] = {SEED: mixed_seed(self._context.get_trial_seed(), here.replica, batch)}
        if nearest.get("built") is not None:
            kept["built"] = union_of([part["built"] for part in old])
        return kept


@dataclass(frozen=True, kw_only=True)
class OfAll:
    """The states that several ranks have written, for an owner whose ``load_whole`` takes them all."""

    states: tuple[Any, ...]


def load_into(owner: Any, state: Any) -> None:
    """Give an owner its state, or those of several ranks."""
    if isinstance(state, OfAll):
        owner.load_whole(state.states)
    else:
        owner.load_state_dict(state)


def check_fits(
    then: list[Record] | None, now: list[Record], uuid: str, distributed: Any, *, by_others: bool
) -> None:
    """Refuse the checkpoint of another model before anything is loaded; a collective.

    DeepSpeed would end in an error of torch's; under ZeRO 3, which compares sizes alone, in none at all.

    Args:
        then: What the engines in it were built with; None where it does not say.
        now: What those of this rank are built with.
        uuid: Of the checkpoint.
        distributed: The ranks.
        by_others: Whether other ranks wrote it.
    """
    # A pipeline's stages have some parameters each, and may be other stages than those that wrote it.
    everything = union_of(distributed.allgather(now)) if by_others else now
    own = misfit(then, everything) if then is not None else None
    if found := [reason for reason in distributed.allgather(own) if reason]:
        raise another_model(uuid, found[0])


def _read_part(path: Path, rank: int, **options: Any) -> dict[str, Any]:
    file = path / f"det_state_dict_rank{rank}.pth"
    part = read_data(file, **options)
    if not isinstance(part, dict):
        raise CheckpointError(
            f"checkpoint {path.name}: {file.name} does not hold the part of a rank\n  fix: use another checkpoint"
        )
    return part


def _position(
    states: Sequence[Mapping[str, Any]], places: Sequence[RankPlace], here: RankPlace
) -> dict[str, Any]:
    """The position in the training data, which ranks without a data loader do not have.

    Raises:
        CheckpointError: it is one of each replica, and there are other replicas or micro-batches now.
    """
    pairs = zip(reversed(places), reversed(states), strict=True)
    found = {place.replica: state for place, state in pairs if state}
    if not found:
        return {}
    state = found.get(here.replica) or found[min(found)]
    then = places[0].replicas, places[0].micro_batch_size
    reason = apart_refusal(state.get(APART), then=then, now=(here.replicas, here.micro_batch_size))
    if reason:
        raise CheckpointError(f"{reason}\n  fix: {DATA_FIX}")
    return dict(state)


def _one_of(owner: str, own: Any, states: Sequence[Any]) -> Any:
    """The state to continue with; a warning where ranks had several, since those of ranks that are gone are lost."""
    if not all(_is_equal(own, state) for state in states):
        logger.warning(
            "warning: %s differed between the ranks that wrote the checkpoint, and the ranks are others now: that of "
            "the same replica, or of rank 0, is kept\n  fix: to join them, give it load_whole(states), with those of "
            "all ranks",
            owner,
        )
    return own


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two states are the same, to the last bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return bool(repr(first) == repr(second))


def _moved_back(value: Any, storages: set[int], device: torch.device) -> Any:
    """A state with the tensors of these storages on a device; not those of :class:`OfAll`."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.untyped_storage().data_ptr() in storages else value
    if isinstance(value, dict):
        return {key: _moved_back(each, storages, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_moved_back(each, storages, device) for each in value)
    return value
