"""What stands for a script where the loop expects a trial: its data, its validations, its part of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

from determined_ds.checkpoints.safe_load import check_state
from determined_ds.checkpoints.settings import records_of
from determined_ds.errors import CheckpointError
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.trial.base import ReconciledTrial


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
        return self.loader.loader

    def _by_script(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the script builds its model, trains it and validates it")

    build_model = build_validation_data_loader = train_batch = evaluate_batch = _by_script  # type: ignore[assignment]


class ReportedValidation:
    """The metrics of a validation that a script reports, in place of a validation that the loop runs."""

    dataset = None

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
    """A script's part of each checkpoint: its objects by name, the passes that are done, the modes of its modules."""

    def __init__(self, training: Any, objects: Mapping[str, Any]) -> None:
        self._training, self._objects = training, dict(objects)
        self._loaded: Mapping[str, Any] = {}

    @property
    def passes(self) -> int:
        """Passes over the data that were done when the loaded checkpoint was written."""
        return int(self._loaded.get("passes", 0))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        states = {name: each.state_dict() for name, each in self._objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        per_pass, engines = self._training.schedule.batches_per_epoch, self._training.context.models
        return {
            "passes": self._training.state.batches_trained // per_pass if per_pass else 0,
            "states": states,
            "modes": [[module.training for module in each.module.modules()] for each in engines],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the objects; the modes are restored once training begins."""
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
        for name, state in self._loaded.get("states", {}).items():
            self._objects[name].load_state_dict(copy.deepcopy(state))

    def restore_modes(self) -> None:
        """Set each module to training or evaluation, as the script had left it."""
        for engine, flags in zip(self._training.context.models, self._loaded.get("modes", ()), strict=False):
            for module, flag in zip(engine.module.modules(), flags, strict=False):
                module.training = flag


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
