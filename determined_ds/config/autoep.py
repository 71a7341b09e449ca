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


def expert_degree(enabled: object, size: object) -> int:
    """Ranks that share the experts; 0 where DeepSpeed leaves them as they are.

    Args:
        enabled: ``expert_parallel.enabled`` of the JSON.
        size: ``expert_parallel.autoep_size``; None: 1, as DeepSpeed has it.
    """
    if size is None:
        size = 1
    return size if enabled is True and isinstance(size, int) and not isinstance(size, bool) else 0


def expert_parallel_values(ds: Document, hyperparameters: Document) -> list[Change]:
    """What ``expert_parallel_size`` fills of a DeepSpeed JSON. Without it, an ``"auto"`` there is off.

    Args:
        ds: The JSON.
        hyperparameters: The point; null or "auto" leaves open what the JSON leaves open.

    Returns:
        Path, value and origin of each.
    """
    size = hyperparameters.get((NAME,))
    is_set = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    values = ((ENABLED, is_set), (DEGREE, size if is_set else 1))
    fillable = (None, AUTO) if is_set else (AUTO,)
    return [(path, value, NAME) for path, value in values if ds.get(path) in fillable]
