"""``load_data.json`` of a checkpoint: what it was written by, without its secrets."""

from __future__ import annotations

from typing import Any

from determined_ds.experiment.secrets import masked


def load_data(trial: Any, context: Any) -> dict[str, Any]:
    """What Determined's own checkpoints tell of their trial, and the seed and the DeepSpeed configuration besides.

    Args:
        trial: The trial.
        context: Its context.
    """
    try:
        exp_conf = context.get_experiment_config()
    except ValueError:
        exp_conf = None
    kind = type(trial)
    return {
        "trial_type": "DeepSpeedTrial",
        "experiment_config": exp_conf and masked(exp_conf),
        "hparams": masked({"hyperparameters": context.get_hparams()})["hyperparameters"],
        "deepspeed_config": masked({"deepspeed_config": context.resolved.ds_config})["deepspeed_config"],
        "trial_seed": context.get_trial_seed(),
        "trial_cls_spec": f"{kind.__module__}:{kind.__qualname__}",
        "is_trainer": True,
    }
