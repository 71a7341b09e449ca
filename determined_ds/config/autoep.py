"""Expert parallel by DeepSpeed's AutoEP: ``expert_parallel_size`` agrees with the JSON's section ``expert_parallel``.

The replicas are divided into groups of ``expert_parallel_size``; each rank of a group holds a part of the experts of a
mixture-of-experts model. The slots do not grow by it: every rank is a replica with its own data.
"""

from __future__ import annotations

from typing import TypeAlias

from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, KeyPath

NAME = "expert_parallel_size"
ENABLED: KeyPath = ("expert_parallel", "enabled")
DEGREE: KeyPath = ("expert_parallel", "autoep_size")
Change: TypeAlias = tuple[KeyPath, object, str]


def expert_degree(ds: Document) -> int:
    """Ranks that share the experts; 0 where DeepSpeed leaves them as they are."""
    size = ds.get(DEGREE, 1)
    is_on = ds.get(ENABLED) is True and isinstance(size, int) and not isinstance(size, bool)
    return size if is_on else 0


def expert_parallel_values(ds: Document, hyperparameters: Document) -> list[Change]:
    """What ``expert_parallel_size`` fills of a DeepSpeed JSON.

    Args:
        ds: The JSON.
        hyperparameters: The point; null or "auto" leaves the JSON as it is.

    Returns:
        Path, value and origin of each.
    """
    size = hyperparameters.get((NAME,))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return []
    return [
        (path, value, NAME)
        for path, value in ((ENABLED, True), (DEGREE, size))
        if ds.get(path) in (None, AUTO)
    ]
