"""Training with DeepSpeed on Determined: one trial class, one experiment YAML, here and on a cluster.

Names are resolved when they are used: ``import determined_ds`` loads no torch, deepspeed or determined.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Accelerator": "determined_ds.config.layout",
    "ConfigError": "determined_ds.errors",
    "DataError": "determined_ds.errors",
    "DataLoader": "determined.pytorch",
    "DataParallelTrial": "determined_ds.trial.base",
    "DeepSpeedMPU": "determined_ds.trial.sequence",
    "SequenceGroup": "determined_ds.trial.sequence",
    "DeepSpeedTrial": "determined.pytorch.deepspeed",
    "DeepSpeedTrialContext": "determined_ds.train.context",
    "DeterminedDSError": "determined_ds.errors",
    "Experiment": "determined_ds.experiment.experiment",
    "PipelineTrial": "determined_ds.trial.pipeline",
    "Problem": "determined_ds.errors",
    "ReconciledTrial": "determined_ds.trial.base",
    "ResolvedConfig": "determined_ds.config.resolve",
    "Results": "determined_ds.report.results",
    "Session": "determined_ds.sessions.session",
    "SeveralEnginesTrial": "determined_ds.trial.base",
    "StreamLoader": "determined_ds.trial.stream_loader",
    "Trainer": "determined_ds.train.loop.trainer",
    "TrainingError": "determined_ds.errors",
    "compare": "determined_ds.tune.compare",
    "init": "determined_ds.train.opening",
    "load_deepspeed_config": "determined_ds.config.resolve",
    "load_experiment": "determined_ds.experiment.experiment",
    "load_model_from_checkpoint_path": "determined_ds.train.bare_trial",
    "load_results": "determined_ds.report.results",
    "load_state_dict_from_checkpoint_path": "determined_ds.train.bare_trial",
    "measure_throughput": "determined_ds.train.loop.measure",
    "open_context": "determined_ds.train.opening",
    "reconcile": "determined_ds.config.resolve",
    "report_to_tools": "determined_ds.train.rank",
    "session": "determined_ds.sessions.session",
}

# For other libraries' names.
_MODULES = ("deepspeed",)

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


_WITH_DEEPSPEED = ("determined.", *(f"determined_ds.{room}." for room in ("sessions", "train", "trial")))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith(
        _WITH_DEEPSPEED
    ):  # which is imported there without a word, and without what is seldom needed
        importlib.import_module("determined_ds.train.group.process_group")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


if TYPE_CHECKING:
    from determined.pytorch import DataLoader
    from determined.pytorch.deepspeed import DeepSpeedTrial

    from determined_ds.config.layout import Accelerator
    from determined_ds.config.resolve import ResolvedConfig, load_deepspeed_config, reconcile
    from determined_ds.errors import ConfigError, DataError, DeterminedDSError, Problem, TrainingError
    from determined_ds.experiment.experiment import Experiment, load_experiment
    from determined_ds.report.results import Results, load_results
    from determined_ds.sessions.session import Session, session
    from determined_ds.train.bare_trial import (
        load_model_from_checkpoint_path,
        load_state_dict_from_checkpoint_path,
    )
    from determined_ds.train.context import DeepSpeedTrialContext
    from determined_ds.train.loop.measure import measure_throughput
    from determined_ds.train.loop.trainer import Trainer
    from determined_ds.train.opening import init, open_context
    from determined_ds.train.rank import report_to_tools
    from determined_ds.trial.base import DataParallelTrial, ReconciledTrial, SeveralEnginesTrial
    from determined_ds.trial.pipeline import PipelineTrial
    from determined_ds.trial.sequence import DeepSpeedMPU, SequenceGroup
    from determined_ds.trial.stream_loader import StreamLoader
    from determined_ds.tune.compare import compare
