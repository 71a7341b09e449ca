"""How a trial is trained, decided before its loop is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from determined_ds.config.params import ProfiledSteps

LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a trial is trained; see :meth:`Trainer.fit`, whose arguments have these names.

    Args:
        lengths: Name of :data:`LENGTHS` -> ``TrainUnit`` or None.
        metric: The validation metric that ``checkpoint_policy: best`` goes by.
        smaller_is_better: Of that metric.
        trial_id: Of the trial, 0 off-cluster.
        time_metric: Of the searcher: what it reads from each validation as the trial's progress.
        profile: The steps that torch's profiler records; None: none.
    """

    lengths: dict[str, Any] = field(default_factory=dict)
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    test_mode: bool = False
    stop_on_nan: bool = True
    save_total_limit: int | None = None
    warm_start: str = "weights"
    asynchronous_checkpoints: bool | None = None
    metric: str = ""
    smaller_is_better: bool = True
    trial_id: int = 0
    time_metric: str = ""
    profile: ProfiledSteps | None = None


def section_of(context: Any, name: str) -> dict[str, Any]:
    """A section of the experiment's configuration, empty where there is none."""
    try:
        return dict(context.get_experiment_config().get(name) or {})
    except ValueError:  # Determined's: no experiment configuration was given
        return {}
