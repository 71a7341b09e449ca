"""One point and where it trains -> what runs there: for commands, ranks and a cluster's start-up hook alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.normalized import find_deepspeed_config
from determined_ds.config.hyperparameters import read_hyperparameters
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where points train. DeepSpeed JSONs are read once for all points.

    Args:
        context_dir: The folder that paths of DeepSpeed JSONs are relative to.
        accelerator: What the ranks compute on.
        slots: Ranks in all, >= 1; None: as the experiment says.
        slots_origin: Where ``slots`` was stated.
        machines: Machines that the slots are spread over.
    """

    context_dir: Path
    accelerator: Accelerator
    slots: int | None = None
    slots_origin: str = ""
    machines: int = 1

    @cached_property
    def _read(self) -> dict[str | int, tuple[Any, Document | tuple[Problem, ...]]]:
        return {}

    def deepspeed_json(self, hyperparameters: Document) -> Document:
        """The DeepSpeed JSON of a point, as written.

        Raises:
            ConfigError: it cannot be read.
        """
        value = hyperparameters.get(("deepspeed_config",))
        key = value if isinstance(value, str) else id(value)
        if key not in self._read:
            try:
                found: Document | tuple[Problem, ...] = find_deepspeed_config(
                    hyperparameters, self.context_dir
                )
            except ConfigError as error:
                found = error.problems
            self._read[key] = (value, found)  # the value is kept, so that its id stays its own
        _, found = self._read[key]
        if isinstance(found, Document):
            return found
        raise ConfigError(found)


def resolve(hyperparameters: Document, where: Where) -> ResolvedConfig:
    """What one point runs with.

    Args:
        hyperparameters: One point of the search space.
        where: Where it trains; its slots are known.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    assert where.slots is not None
    try:
        ds = where.deepspeed_json(hyperparameters)
    except ConfigError as error:
        raise ConfigError([*error.problems, *read_hyperparameters(hyperparameters)[1]]) from None
    return reconcile(
        hyperparameters,
        ds,
        slots=where.slots,
        accelerator=where.accelerator,
        slots_origin=where.slots_origin,
        machines=where.machines,
    )
