"""global_batch_size = micro-batch x accumulation x replicas, completed exactly or refused.

DeepSpeed and Determined both floor where the numbers do not divide (``_set_batch_related_parameters`` in
deepspeed 0.19.8's ``runtime/config.py``; ``calculate_batch_sizes`` in determined 0.38.1's ``util.py``).
Nothing is floored here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from determined_ds.config.topology import nearest_divisor
from determined_ds.errors import ConfigError, Problem


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

    Any three determine the fourth. Of the rest, an accumulation that nobody states is 1 when that still
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
        code="batch",
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
