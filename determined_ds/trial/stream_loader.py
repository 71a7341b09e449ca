"""StreamLoader: for a stream what Determined's ``DataLoader`` is for data with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import data as torch_data

from determined_ds.trial.returned import refused


class StreamLoader:
    """Micro-batches from data that is read from beginning to end, again and again.

    All replicas read one stream, and each keeps its own part: global batch ``b`` is samples ``b*G .. (b+1)*G`` of the
    passes over the dataset one after the other. Nothing is dropped: a batch may hold the end of one pass and the
    beginning of the next. To shuffle, shuffle in the dataset: its files, and a buffer of samples. Do the work on each
    sample in ``collate_fn``, which sees only the samples that are kept, and runs in the workers.

    Args:
        dataset: A ``torch.utils.data.IterableDataset``, any other object that can be iterated again and again, or a
            function without arguments that returns a new iterator. ``set_epoch(n)`` is called before pass ``n``
            where it exists. With ``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader`` takes
            them, a resumed run continues from its state; otherwise it reads and skips.
        batch_size: Samples in a micro-batch.
        sharded: The dataset yields only the samples of this replica. Otherwise it must yield the same on all of
            them: what it draws from the generators of random, numpy and torch is the same on all.
        collate_fn: List of samples -> micro-batch; torch's ``default_collate`` if None.
        num_workers: Processes that load; each reads the whole stream and makes every ``num_workers``-th micro-batch.
            ``get_worker_info()`` is None in the dataset, so one that splits by workers yields everything.
        worker_init_fn: As for torch's ``DataLoader``.
        workers: More of its options: ``pin_memory``, ``timeout`` (seconds), ``multiprocessing_context``,
            ``prefetch_factor`` and ``persistent_workers``.

    Raises:
        ConfigError: an iterator, which can be read only once.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        sharded: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        **workers: Any,
    ) -> None:
        self.dataset, self.batch_size, self.sharded = dataset, batch_size, sharded
        self.collate_fn = collate_fn or torch_data.default_collate
        self.num_workers, self.worker_init_fn = num_workers, worker_init_fn
        self.workers = {"num_workers": num_workers, **workers}
        if hasattr(dataset, "__next__") and not hasattr(dataset, "load_state_dict"):
            message = "an iterator can be read only once: no replica or resumed run can begin it again"
            fix = "give the function that makes it, and not what it returns: training_loader(read)"
            raise refused("dataset", message, fix, "stream-iterator", value=type(dataset).__name__)

    @property
    def name(self) -> str:
        """The dataset, for messages."""
        return str(getattr(self.dataset, "__qualname__", type(self.dataset).__name__))

    def open(self) -> Iterator[Any]:
        """Begin a pass over the dataset. Returns an iterator over samples."""
        return iter(self.dataset if hasattr(self.dataset, "__iter__") else self.dataset())


def length_of(data: Any) -> int | None:
    """The ``len()`` of a dataset or a loader; None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read from beginning to end, without an index."""
    can_be_read = not hasattr(dataset, "__getitem__") and (hasattr(dataset, "__iter__") or callable(dataset))
    return can_be_read or isinstance(dataset, torch_data.IterableDataset)


def micro_batch_of(loader: Any, samples: int) -> Any:
    """A micro-batch as a loader would make it, before training; of a stream, its first sample again and again."""
    collate = getattr(loader, "collate_fn", None) or torch_data.default_collate
    dataset = loader.dataset
    if not isinstance(loader, StreamLoader):
        return collate([dataset[index % len(dataset)] for index in range(samples)])
    state = dataset.state_dict() if hasattr(dataset, "load_state_dict") else None
    first = next(loader.open())
    if state is not None:
        dataset.load_state_dict(state)
    return collate([first] * samples)
