"""global_batch_size = micro-batch x accumulation x replicas, completed exactly or refused.

DeepSpeed and Determined both round down where the numbers do not divide (``_set_batch_related_parameters`` in
deepspeed 0.19.8's ``runtime/config.py``; ``calculate_batch_sizes`` in determined 0.38.1's ``util.py``).
Batch sizes are never rounded here; one that does not divide is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from determined_ds.config.hyperparameters import Hyperparameters
from determined_ds.config.numbers import AUTO, LARGEST
from determined_ds.config.topology import Topology, nearest_divisor
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import ConfigError, Origin, Problem


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The four numbers of a batch; the first is the product of the others.

    Args:
        global_batch_size: Samples per optimizer step over all replicas (DeepSpeed's ``train_batch_size``).
        micro_batch_size: Samples per forward pass of a replica (``train_micro_batch_size_per_gpu``).
        accumulation: Micro-batches per optimizer step of a replica (``gradient_accumulation_steps``);
            in a pipeline, its ``micro_batches``.
        replicas: Data-parallel copies (``data_parallel_world_size``).
    """

    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    replicas: int

    def __post_init__(self) -> None:
        assert min(self.global_batch_size, self.micro_batch_size, self.accumulation, self.replicas) >= 1, self
        assert self.global_batch_size == self.micro_batch_size * self.accumulation * self.replicas, self


NAMES = {
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "replicas": "data_parallel_world_size",
}
# Key of the DeepSpeed JSON -> its name here.
BATCH_KEYS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation",
}
FACTORS = ("micro_batch_size", "accumulation", "replicas")


def complete_batch(
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    replicas: int | None = None,
    origins: dict[str, str] | None = None,
) -> Batch:
    """Complete any subset of the four that determines the rest.

    Any three determine the fourth. Of the rest, an accumulation that is not stated is 1 when that still
    leaves something to derive, as in DeepSpeed: global and replicas give the micro-batch.

    Args:
        global_batch_size: >= 1 or None.
        micro_batch_size: >= 1 or None.
        accumulation: >= 1 or None.
        replicas: >= 1 or None.
        origins: Name of each argument -> where its value came from, for messages.

    Raises:
        ConfigError: too little is given, or the numbers do not divide; the fix names the nearest
            feasible values.
    """
    given = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "accumulation": accumulation,
        "replicas": replicas,
    }
    missing = [name for name, value in given.items() if value is None]
    stated = [name for name in FACTORS if given[name] is not None]
    if "accumulation" in missing and len(missing) == 2:
        given["accumulation"] = 1
        missing.remove("accumulation")
    if len(missing) > 1:
        raise ConfigError(_too_little(missing))
    product = math.prod(given[name] or 1 for name in FACTORS)
    total = given["global_batch_size"] if global_batch_size is not None else product
    assert total is not None
    if total % product or (not missing and total != product):
        raise ConfigError(_does_not_divide(given, stated, missing, product, origins or {}))
    for name in missing:
        given[name] = total if name == "global_batch_size" else total // product
    return Batch(**{name: value for name, value in given.items() if value is not None})


def _too_little(missing: list[str]) -> Problem:
    names = [NAMES[name] for name in missing]
    absent = f"{', '.join(names[:-1])} and {names[-1]} are {'both' if len(names) == 2 else 'all'} missing"
    return Problem(
        key="hyperparameters.global_batch_size" if "global_batch_size" in missing else NAMES[missing[0]],
        message=f"the batch is not determined: {absent}",
        fix="state global_batch_size in the hyperparameters; the rest is derived from it and the slots",
        code="batch-missing",
    )


def _does_not_divide(
    given: dict[str, int | None], stated: list[str], missing: list[str], product: int, origins: dict[str, str]
) -> Problem:
    total = given["global_batch_size"]
    assert total is not None
    factors = [
        f"{NAMES[name]} {given[name]}" + (f" ({origins[name]})" if origins.get(name) else "")
        for name in stated
    ]
    fixes = [f"global_batch_size {product}"]
    if missing:
        below, above = total // product * product, (total // product + 1) * product
        fixes = [f"global_batch_size {below} or {above}" if below else f"global_batch_size {above}"]
    fixes += _other_factors(given, stated, missing, total)
    equals = f" = {product}" if len(factors) > 1 else ""
    return Problem(
        key="hyperparameters.global_batch_size",
        value=total,
        origin=origins.get("global_batch_size", ""),
        message=f"is not {'a multiple of ' if missing else ''}{' x '.join(factors)}{equals}",
        fix="use " + ", or ".join(fixes),
        code="batch",
    )


def _other_factors(
    given: dict[str, int | None], stated: list[str], missing: list[str], total: int
) -> list[str]:
    """Nearest feasible micro-batch and accumulation, where these are stated, with the rest left alone."""
    found = []
    for name in ("micro_batch_size", "accumulation"):
        value = given[name]
        if name not in stated or value is None:
            continue
        others = math.prod(given[other] or 1 for other in FACTORS if other != name)
        if total % others:
            continue
        best = nearest_divisor(total // others, value) if missing else total // others
        if best is not None and best != value:
            found.append(f"{NAMES[name]} {best}")
    return found


# ------------------------------------------------------------------------------------------- of one point


def one_sample_each(layout: Topology) -> Batch:
    """The smallest batch, assumed where none can be counted."""
    replicas = layout.data_parallel_world_size
    return Batch(global_batch_size=replicas, micro_batch_size=1, accumulation=1, replicas=replicas)


def stated_batch(hp: Hyperparameters, document: Document, ds: Document, topology: Topology) -> Batch:
    """The batch that the hyperparameters and the DeepSpeed JSON state, completed.

    Raises:
        ConfigError: they state too little, too much, or numbers that do not divide.
    """
    given: dict[str, int] = {"replicas": topology.data_parallel_world_size}
    origins = {"replicas": f"{topology.slots} slots"}
    problems: list[Problem] = []
    for key, name in BATCH_KEYS.items():
        value = ds.get((key,))
        if value not in (None, AUTO):
            given[name], origins[name] = value, ds.origin((key,))
            if value > LARGEST:
                fix = 'write a smaller number, or "auto"'
                problems.append(ds.problem((key,), f"must be at most {LARGEST}", fix, "out-of-range"))
    if problems:
        raise ConfigError(problems)
    own, other = hp.global_batch_size, given.get("global_batch_size")
    if own is None:
        return complete_batch(**given, origins=origins)
    ours = {**given, "global_batch_size": own}
    ours_from = {**origins, "global_batch_size": document.origin(("global_batch_size",))}
    if other in (None, own):
        return complete_batch(**ours, origins=ours_from)
    problems.append(_stated_twice(document, f"{other} ({origins['global_batch_size']})"))
    try:
        complete_batch(**ours, origins=ours_from)
    except (
        ConfigError
    ) as error:  # that the rest does not divide is news only where neither of the two would do
        if not _divides(given):
            problems += error.problems
    raise ConfigError(problems)


def _divides(given: dict[str, int]) -> bool:
    try:
        complete_batch(**given, origins=None)
    except ConfigError:
        return False
    return True


def _stated_twice(document: Document, other: str) -> Problem:
    fix = 'state it once: write "auto" for train_batch_size, and global_batch_size is used'
    return document.problem(
        ("global_batch_size",), f"differs from train_batch_size = {other}", fix, "batch-twice"
    )


def open_sizes(ds: Document, document: Document, batch: Batch) -> list[tuple[KeyPath, Any, Origin]]:
    """The batch sizes that the JSON leaves open, with their origins."""
    place = document.origin(("global_batch_size",))
    changes: list[tuple[KeyPath, Any, Origin]] = []
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) in (None, AUTO):
            factors = " x ".join(
                f"{NAMES[other]} {getattr(batch, other)}" for other in FACTORS if other != name
            )
            derived = f"derived: global_batch_size {batch.global_batch_size} / ({factors})"
            if name == "global_batch_size":
                is_stated = document.get(("global_batch_size",)) not in (None, AUTO)
                derived = f"global_batch_size, {place}" if is_stated else f"derived: {factors}"
            changes.append(((key,), getattr(batch, name), place.reworded(derived)))
    return changes


def open_degree(ds: Document, document: Document, layout: Topology) -> list[tuple[KeyPath, Any, Origin]]:
    """The ranks that share a sequence, by which DeepSpeed counts replicas, where the JSON leaves them open."""
    key, size = "sequence_parallel_size", layout.sequence_parallel_size
    if size == 1 or ds.get((key,)) not in (None, AUTO):
        return []
    place = document.origin((key,))
    return [((key,), size, place.reworded(f"hyperparameters.{key}, {place}"))]
