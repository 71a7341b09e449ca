"""Tensor parallel by DeepSpeed's AutoTP: ``model_parallel_size`` agrees with the JSON's ``tensor_parallel``.

``model_parallel_size: N`` beside a section ``tensor_parallel`` fills ``autotp_size``; ``autotp_size: N`` alone is the
``model_parallel_size``. Two that differ are refused by the rule ``model-parallel-degree``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from determined_ds.config.hyperparameters import Hyperparameters
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, KeyPath

SECTION: KeyPath = ("tensor_parallel",)
DEGREE: KeyPath = ("tensor_parallel", "autotp_size")
HEAD: KeyPath = ("tensor_parallel", "vocab_parallel_lm_head")
SIZE = "model_parallel_size"
Change: TypeAlias = tuple[KeyPath, object, str]


def stated_degree(ds: Document) -> int | None:
    """``autotp_size``, where the JSON states one above 1."""
    size = ds.get(DEGREE)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 1 else None


def with_degree(hp: Hyperparameters, hyperparameters: Document, ds: Document) -> Hyperparameters:
    """The hyperparameters with the JSON's ``autotp_size``, where they leave ``model_parallel_size`` open.

    Args:
        hp: What was read of them.
        hyperparameters: They, as written.
        ds: The DeepSpeed JSON.
    """
    size = stated_degree(ds)
    if size is None or hyperparameters.get((SIZE,)) not in (None, AUTO):
        return hp
    return replace(hp, model_parallel_size=size)


def tensor_parallel_values(
    ds: Document, model_parallel_size: int, *, everywhere: bool = False
) -> list[Change]:
    """What a DeepSpeed JSON leaves open of its section ``tensor_parallel``.

    ``vocab_parallel_lm_head`` is off unless it is stated: DeepSpeed would turn it on where the output layer is tied to
    the embedding, and the model would then return each rank its own part of the logits.

    Args:
        ds: The JSON.
        model_parallel_size: The degree.
        everywhere: Fill it where there is no such section, too.

    Returns:
        Path, value and origin of each.

    Source: deepspeed 0.19.8 ``DeepSpeedEngine._apply_autotp_partitioning`` in ``runtime/engine.py``,
    ``auto_vocab_parallel_lm_head``.
    """
    section = ds.get(SECTION)
    if not isinstance(section, dict) and not (everywhere and section is None):
        return []
    changes: list[Change] = []
    size = ds.get(DEGREE)
    if size is None or size == AUTO:
        size = model_parallel_size
        changes.append((DEGREE, size, SIZE))
    if isinstance(size, int) and size > 1 and ds.get(HEAD) in (None, AUTO):
        changes.append((HEAD, False, "the loss is computed from whole logits"))
    return changes
