"""When a training run reports, validates, checkpoints and ends: arithmetic on the number of batches trained.

Every period counts from the start of training, whether this process trained those batches or an earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass
from datetime import timedelta

from determined import pytorch

from determined_ds.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Due:
    """What is due after a batch."""

    report: bool = False
    validate: bool = False
    checkpoint: bool = False
    end: bool = False

    def __bool__(self) -> bool:
        return self.report or self.validate or self.checkpoint or self.end


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The arguments of ``Trainer.fit`` that say when something happens.

    Args:
        max_length: ``Batch(n)`` or ``Epoch(n)``; None where only a script knows when it ends.
        validation_period: A period (int) or a schedule (container); None: only at the end.
        checkpoint_period: The same; or a time, by which nothing is due after a certain batch.
        reporting_period: The same.
        batches_per_epoch: Whole batches in an epoch, >= 1; None where the data has no epochs.

    Raises:
        ConfigError: each argument in epochs, where there are none.
    """

    max_length: pytorch.TrainUnit | None
    validation_period: pytorch.TrainUnit | None
    checkpoint_period: pytorch.TrainUnit | timedelta | None
    reporting_period: pytorch.TrainUnit | None
    batches_per_epoch: int | None

    def __post_init__(self) -> None:
        if self.batches_per_epoch is None and self.in_epochs:
            message = "the training data has no length, and so no epochs"
            fix = "count in batches, {}: {{batches: 1000}}, or give the dataset a __len__"
            raise ConfigError(
                Problem(
                    key=f"fit.{name}",
                    value=f"{unit.value} epochs",
                    message=message,
                    fix=fix.format(name),
                    code="epochs-without-length",
                )
                for name, unit in vars(self).items()
                if isinstance(unit, pytorch.Epoch)
            )

    @property
    def num_batches(self) -> int:
        """Batches from the start of training to its end; more than can be trained where that is not known."""
        if self.max_length is None:
            return sys.maxsize
        length = self.max_length.value
        assert isinstance(length, int)
        return length * self._per_epoch if isinstance(self.max_length, pytorch.Epoch) else length

    @property
    def stated_batches(self) -> int | None:
        """The same; None where it is not known."""
        return None if self.max_length is None else self.num_batches

    @property
    def in_epochs(self) -> bool:
        """Whether any length or period is in epochs."""
        return any(isinstance(unit, pytorch.Epoch) for unit in vars(self).values())

    @property
    def _per_epoch(self) -> int:
        assert self.batches_per_epoch is not None, "checked as it is made"
        return self.batches_per_epoch

    def epoch_of(self, batch: int) -> tuple[int, bool, bool]:
        """The epoch of a batch (from 0), and whether it is its first and its last; one endless epoch without epochs."""
        if self.batches_per_epoch is None:
            return 0, batch == 0, False
        epoch, inside = divmod(batch, self.batches_per_epoch)
        return epoch, inside == 0, inside == self.batches_per_epoch - 1

    def due(self, batches_trained: int) -> Due:
        """What is due after ``batches_trained`` batches (>= 1). At the end everything is."""
        end = batches_trained >= self.num_batches
        return Due(
            report=end or self._reached(self.reporting_period, batches_trained),
            validate=end or self._reached(self.validation_period, batches_trained),
            checkpoint=end or self._reached(self.checkpoint_period, batches_trained),
            end=end,
        )

    def _reached(self, unit: pytorch.TrainUnit | timedelta | None, batches_trained: int) -> bool:
        if unit is None or isinstance(unit, timedelta):
            return False
        count = batches_trained
        if isinstance(unit, pytorch.Epoch):
            count, inside = divmod(batches_trained, self._per_epoch)
            if inside:
                return False
        if isinstance(unit.value, int):
            # Determined: a period below 1 is every step.
            return unit.value < 1 or count % unit.value == 0
        assert isinstance(unit.value, Container)
        return count in unit.value
