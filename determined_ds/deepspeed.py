"""``determined.pytorch.deepspeed`` (0.38.1) by the same names, on this library's context and loop.

One line brings a trial here::

    from determined_ds import deepspeed as det_ds  # was: from determined.pytorch import deepspeed as det_ds

``DeepSpeedTrial`` is Determined's own class, so a trial may import it from either. ``DeepSpeedTrialController`` is,
too: Determined's loop, which ``Trainer`` does not use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from determined.pytorch.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialController,
    ModelParallelUnit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from determined.pytorch.deepspeed import overwrite_deepspeed_config as overwritten_by_determined

from determined_ds.documents.text import as_plain
from determined_ds.train.context import DeepSpeedTrialContext
from determined_ds.train.loop.trainer import Trainer
from determined_ds.train.opening import init
from determined_ds.trial.sequence import DeepSpeedMPU

# What trials that were written before ``make_deepspeed_mpu`` call it.
DeterminedDeepSpeedMPU = DeepSpeedMPU

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "DeepSpeedTrialController",
    "DeterminedDeepSpeedMPU",
    "ModelParallelUnit",
    "Trainer",
    "init",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]


def overwrite_deepspeed_config(
    base_ds_config: str | os.PathLike[str] | Mapping[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A DeepSpeed JSON overwritten leaf by leaf, as Determined's function of this name does.

    It fills no ``"auto"`` and checks nothing, unlike ``context.resolved.ds_config``.

    Args:
        base_ds_config: A path, or a mapping, which is not changed.
        source_ds_dict: What overwrites it, such as the hyperparameter ``overwrite_deepspeed_args``.

    Returns:
        A plain dict for ``deepspeed.initialize(config=...)``, lists and all, whatever ``attrdict`` made of them.
    """
    is_mapping = isinstance(base_ds_config, Mapping)
    base = as_plain(base_ds_config) if is_mapping else os.fspath(base_ds_config)  # type: ignore[arg-type]
    return dict(overwritten_by_determined(base, as_plain(source_ds_dict)))
