"""When a run reports, validates, checkpoints and ends: as Determined's documentation of ``fit`` says, to the batch."""

from __future__ import annotations

from collections.abc import Container
from datetime import timedelta

import pytest
from determined.pytorch import Batch, Epoch, TrainUnit
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.runtime.loop.boundaries import Schedule


def model(unit: TrainUnit | None, batches_trained: int, batches_per_epoch: int) -> bool:
    """The documentation, in ten lines: a period counts batches or epochs from the start; a schedule lists them."""
    if unit is None:
        return False
    if isinstance(unit, Epoch):
        if batches_trained % batches_per_epoch:
            return False
        count = batches_trained // batches_per_epoch
    else:
        count = batches_trained
    return count in unit.value if isinstance(unit.value, Container) else count % unit.value == 0


units = st.one_of(
    st.none(),
    *(
        st.builds(kind, st.one_of(st.integers(1, 12), st.sets(st.integers(1, 12)).map(list)))
        for kind in (Batch, Epoch)
    ),
)
lengths = st.builds(lambda kind, n: kind(n), st.sampled_from([Batch, Epoch]), st.integers(1, 8))


@given(
    max_length=lengths,
    validation=units,
    checkpoint=units,
    reporting=units,
    per_epoch=st.integers(1, 7),
    resumed_at=st.integers(0, 60),
)
def test_every_boundary_is_where_the_documentation_puts_it(
    max_length: TrainUnit,
    validation: TrainUnit | None,
    checkpoint: TrainUnit | None,
    reporting: TrainUnit | None,
    per_epoch: int,
    resumed_at: int,
) -> None:
    """In every combination, and whether or not the batches before were trained by another process."""
    schedule = Schedule(
        max_length=max_length,
        validation_period=validation,
        checkpoint_period=checkpoint,
        reporting_period=reporting,
        batches_per_epoch=per_epoch,
    )
    length = max_length.value * (per_epoch if isinstance(max_length, Epoch) else 1)
    assert schedule.num_batches == length
    for batch in range(min(resumed_at, length) + 1, length + 1):
        due = schedule.due(batch)
        end = batch == length
        assert due.end == end
        assert due.validate == (end or model(validation, batch, per_epoch))
        assert due.checkpoint == (end or model(checkpoint, batch, per_epoch))
        assert due.report == (end or model(reporting, batch, per_epoch))
        assert bool(due) == (due.end or due.validate or due.checkpoint or due.report)


@pytest.mark.parametrize("value", [0, -1])
def test_a_period_below_one_is_every_batch(value: int) -> None:
    """As in Determined's ``TrainUnit``."""
    schedule = Schedule(
        max_length=Batch(3),
        validation_period=Batch(value),
        checkpoint_period=None,
        reporting_period=None,
        batches_per_epoch=10,
    )
    assert [b for b in (1, 2, 3) if schedule.due(b).validate] == [1, 2, 3]


def test_nothing_is_due_after_a_certain_batch_by_a_time() -> None:
    schedule = Schedule(
        max_length=Batch(9),
        validation_period=None,
        checkpoint_period=timedelta(seconds=1),
        reporting_period=None,
        batches_per_epoch=None,
    )
    assert [batch for batch in range(1, 10) if schedule.due(batch).checkpoint] == [9]
    assert not schedule.in_epochs
