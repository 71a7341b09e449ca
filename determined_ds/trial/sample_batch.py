"""A micro-batch of a trial's training data, before training has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from determined_ds.trial.stream_loader import StreamLoader


def micro_batches_of(loader: Any, samples: int) -> Callable[[], Any]:
    """Makes micro-batches as a loader would, on the CPU, in this process; of a stream, of its first sample alone.

    Args:
        loader: What ``build_training_data_loader`` returned.
        samples: Of a micro-batch.

    Returns:
        A function that returns one each time it is called.
    """
    collate = getattr(loader, "collate_fn", None) or default_collate
    dataset = loader.dataset
    if isinstance(loader, StreamLoader):
        first = _first_of(loader)
        return lambda: collate([first] * samples)
    return lambda: collate([dataset[index % len(dataset)] for index in range(samples)])


def _first_of(loader: StreamLoader) -> Any:
    """The first sample of a stream, which is where it was afterwards."""
    if not hasattr(loader.dataset, "load_state_dict"):
        return next(loader.open())
    state = loader.dataset.state_dict()
    try:
        return next(loader.open())
    finally:
        loader.dataset.load_state_dict(state)
