"""What a checkpoint holds besides the engines: where training stands, and each rank's own part.

A rank's part has its generators, callbacks, custom reducers, unreported sums and position in the data.

1. A rank writes its part with its place: which replica each rank holds, and which of them it is.
2. Ranks in the places of those that wrote read their own parts, bit for bit.
3. Other ranks read the part of rank 0: callbacks, a script's objects, and the position in the data, which is the same
   on every replica. Generators of other replicas get new seeds; metrics and custom reducers begin anew.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from determined_ds.checkpoints.engine_slices import owners_of
from determined_ds.checkpoints.engines import overrides, together
from determined_ds.checkpoints.files import (
    DATA_FIX,
    LOAD_DATA,
    PART,
    STATE,
    THEIR_STATE,
    TrialState,
    data_refusal,
    elastic_refusal,
)
from determined_ds.checkpoints.safe_load import check_state, read_data, serialized
from determined_ds.errors import CheckpointError
from determined_ds.experiment.secrets import masked
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.report.numbers import count
from determined_ds.train.data.samples import APART
from determined_ds.train.data.seeds import SEED, mixed_seed
from determined_ds.trial.divided import degree_of
from determined_ds.trial.returned import method_of

FIX = "resume from another checkpoint, or copy its files again"

# ------------------------------------------------------------------------------------------- where training stands


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{THEIR_STATE} names {module}.{name}")


def read_state(path: Path) -> TrialState:
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
        message = f"checkpoint {path.name} has no {STATE}: it was not written by a DeepSpeedTrial"
    except ValidationError as error:
        first = error.errors()[0]
        message = f"checkpoint {path.name} says {first['loc'][0]} = {first['input']!r} as its state"
    except (OSError, ValueError, EOFError, TypeError, KeyError, pickle.UnpicklingError) as error:
        message = f"where training stood in checkpoint {path.name} cannot be read: {error}"
    raise CheckpointError(f"{message}\n  fix: {FIX}")


# ------------------------------------------------------------------------------------------- a rank's place


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands. Ranks in equal places hold the same layers, and so have read the same data."""

    rank: int
    holds: tuple[int, ...]  # of each rank, the data-parallel copy that it holds, or a part of
    owners: tuple[tuple[int, ...], ...] = ()  # of each engine, which stage of its pipeline holds each layer
    copies: int = 1  # neighbouring ranks that compute the same losses; the first counts (tensor parallel)
    replicas: int
    calls: int = field(compare=False)  # training metrics of an optimizer step, over all replicas
    micro_batch_size: int = field(compare=False)  # samples of a replica in a forward pass

    @property
    def replica(self) -> int:
        """The copy that this rank holds, or a part of."""
        return self.holds[self.rank]


class RankParts:
    """Writes and reads the parts of ranks."""

    def __init__(self, trial: Any, context: Any) -> None:
        self._trial, self._context = trial, context
        self._was_tried = False

    @cached_property
    def here(self) -> RankPlace:
        """The place of this rank; the first call is a collective."""
        context = self._context
        distributed, mpu, batch = context.distributed, context._mpu, context.resolved.batch
        in_one_call = context.use_pipeline_parallel or context._manual_grad_accumulation
        return RankPlace(
            rank=distributed.rank,
            holds=tuple(distributed.allgather(mpu.data_parallel_rank)),
            owners=tuple(owners_of(engine) for engine in context.models),
            copies=max((degree_of(engine) for engine in context.models), default=1),
            replicas=mpu.data_parallel_world_size,
            calls=mpu.data_parallel_world_size * (1 if in_one_call else batch.accumulation),
            micro_batch_size=batch.micro_batch_size,
        )

    # ------------------------------------------------------------------------------------- written

    def state_files(self, state: TrialState, own_layout: str, data: Any) -> dict[str, bytes]:
        """Name -> content of the files that describe the state and the trial, without secrets; of rank 0.

        ``load_data.json`` is as in Determined's own checkpoints, with more: see
        :func:`~determined_ds.checkpoints.files.written_by`.
        """

        def stated(getter: Callable[[], Any]) -> Any:
            try:
                return getter()
            except ValueError:  # a script that opened its context without any
                return None

        context, kind, here = self._context, type(self._trial), self.here
        config, hparams = stated(context.get_experiment_config), stated(context.get_hparams)
        load_data = {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": config and masked(config),
            "hparams": hparams and masked({"hyperparameters": hparams})["hyperparameters"],
            **masked({"deepspeed_config": context.resolved.ds_config}),
            "trial_seed": context.get_trial_seed(),
            "written_by": {
                "ranks": len(here.holds),
                "replicas": here.replicas,
                "micro_batch_size": here.micro_batch_size,
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
        if not self._was_tried:
            for kind in ("callbacks", "parts"):
                for name, state in part[kind].items():
                    check_state(f"the state of {kind.removesuffix('s')} {name!r}", state)
            check_state("what on_checkpoint_save_start added", part)
            self._was_tried = True
        elif not at_once:
            # What cannot be copied is written now.
            with contextlib.suppress(Exception):
                kept = copy.deepcopy(part)
                return lambda: serialized(kept).getbuffer()
        return serialized(part).getbuffer

    # ------------------------------------------------------------------------------------- read

    def read(self, path: Path, *, batch: int) -> tuple[dict[str, Any], str]:
        """This rank's part of a checkpoint of a batch, and a line to show where other ranks wrote it; a collective."""
        here, distributed = self.here, self._context.distributed
        ranks, now = len(here.holds), count(len(here.holds), "rank")
        whole = elastic_refusal(path)  # why it is read as it was written, or not at all
        if whole is None and overrides(self._trial, "load"):
            whole = f"{method_of(self._trial, 'load')} decides itself what is read"
        there = len(list(path.glob(PART.format("*"))))
        if not any(distributed.allgather(there or (path / LOAD_DATA).is_file())):  # it was imported
            return {}, ""
        written = max(1, there)  # one that is missing is named when it is read
        own = together(distributed, lambda: self._part(path, here.rank) if written == ranks else {})
        # Determined's own loop writes no place.
        then = RankPlace(**own["place"]) if "place" in own else None
        if all(distributed.allgather(bool(own) and then in (None, here))):
            parts = own.setdefault("parts", {})
            if then is not None:
                parts["data"] = self._position(then, parts.get("data"))  # the micro-batch may have changed
                if then.calls != here.calls and "metrics" in parts:  # a step adds another number of losses
                    for sums in parts["metrics"].values():
                        sums |= {name: each * here.calls / then.calls for name, each in sums.items()}
            return own, ""
        if whole is not None:
            raise CheckpointError(
                f"checkpoint {path.name} was written by {count(written, 'rank')}, and these are {ranks}, or hold other "
                f"parts of the model; only those can read it: {whole}\n  fix: resume with {written} slots, and the "
                "pipeline and model-parallel sizes that wrote it"
            )
        part = together(distributed, lambda: self._taken_over(path, batch))
        was = count(written, "rank")
        changed = f"{was} -> {now}" if was != now else f"{now}, which hold other parts of the model"
        line = f"elastic     {changed}; callbacks go on with the state of rank 0; training metrics "
        return part, f"{line}since the last report begin anew"

    def _part(self, path: Path, rank: int) -> dict[str, Any]:
        """A rank's part, its tensors on this rank's device where they were on the other's."""
        device = self._context.device

        def placed(storage: Any, location: str) -> Any:
            # A reducer adds up on the device of its batches: on the host, its next addition would fail.
            return storage.to(device=device) if location.startswith(device.type) else storage

        file = path / PART.format(rank)
        part = read_data(file, map_location=placed)
        if not isinstance(part, dict):
            message = f"checkpoint {path.name}: {file.name} does not hold the part of a rank"
            raise CheckpointError(f"{message}\n  fix: {FIX}")
        return part

    def _taken_over(self, path: Path, batch: int) -> dict[str, Any]:
        """The part of rank 0, which has all that is the same on every replica; other replicas draw by a new seed."""
        part, replica = self._part(path, 0), self.here.replica
        if replica:
            part["rng_state"] = {SEED: mixed_seed(self._context.get_trial_seed(), replica, batch)}
        for name in ("metrics", "reducers"):
            part["parts"].pop(name, None)
        part["parts"]["data"] = self._position(RankPlace(**part["place"]), part["parts"].get("data"))
        return part

    def _position(self, then: RankPlace, position: Mapping[str, Any] | None) -> dict[str, Any]:
        """The position in the training data that a rank had, if these ranks can go on with it."""
        here, written = self.here, {**vars(then), "data_apart": (position or {}).get(APART)}
        if reason := data_refusal(written, replicas=here.replicas):
            raise CheckpointError(f"{reason}\n  fix: {DATA_FIX}")
        return dict(position or {})
