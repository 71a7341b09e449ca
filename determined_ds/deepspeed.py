"""``determined.pytorch.deepspeed`` (0.38.1) by the same names, on this library's context and loop.

One line brings a trial here::

    from determined_ds import deepspeed as det_ds  # was: from determined.pytorch import deepspeed as det_ds

``DeepSpeedTrial`` is Determined's own class, so a trial may import it from either. ``DeepSpeedTrialController`` is,
too: Determined's loop, which ``Trainer`` does not use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined.pytorch.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialController,
    ModelParallelUnit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)

from determined_ds.documents.files import read_json
from determined_ds.documents.text import as_plain
from determined_ds.train.context import DeepSpeedTrialContext
from determined_ds.train.loop.trainer import Trainer
from determined_ds.train.opening import init
from determined_ds.trial.of_context import DeepSpeedMPU

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
    """A DeepSpeed JSON overwritten leaf by leaf.

    Unlike ``context.overwrite``, it fills no ``"auto"`` and checks nothing.

    Args:
        base_ds_config: A path, or a mapping, which is not changed.
        source_ds_dict: What overwrites it, such as the hyperparameter ``overwrite_deepspeed_args``.

    Returns:
        A plain dict for ``deepspeed.initialize(config=...)``, lists and all, whatever ``attrdict`` made of them.

    Raises:
        ConfigError: the file cannot be read, or states a key twice.
        TypeError: ``base_ds_config`` is neither a path nor a mapping.
    """
    if isinstance(base_ds_config, Mapping):
        base = as_plain(base_ds_config)
    elif isinstance(base_ds_config, (str, os.PathLike)):
        base = as_plain(read_json(Path(base_ds_config)).data)
    else:
        kind = type(base_ds_config).__name__
        raise TypeError(f"Expected string or dict for base_ds_config argument. It is of type {kind}.")
    return _merged(base, as_plain(source_ds_dict))


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        own = base.get(key)
        base[key] = _merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return base
