"""The same tuning as an experiment for a cluster: an ordinary search, whose trials measure themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import KeyPath
from determined_ds.errors import NOT_GIVEN
from determined_ds.experiment.entrypoint import MEASURE, PIPELINE_TRIAL
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.tune.choice import (
    ACCUMULATION,
    BATCH_KEYS,
    OFFLOADS,
    Base,
    Choice,
    applied,
)
from determined_ds.tune.stage_axes import Left, emitted_orders
from determined_ds.tune.variants import Variant

LARGEST_GRID = 100  # points; beyond them, adaptive ASHA looks at so many
DEFAULT_BUCKET = 500_000_000
OVERWRITE = ("hyperparameters", "overwrite_deepspeed_args")


def emitted(
    base: Base,
    choices: Sequence[Choice],
    left: Sequence[Left],
    *,
    metric: str,
    smaller_is_better: bool,
    steps: int,
    warmup: int,
) -> str:
    """A Determined experiment over the same choices.

    Its trials train ``warmup + steps`` batches, report the metric, and end; a point that cannot run is dropped by
    the searcher.

    Args:
        base: The experiment.
        choices: What there is to choose from, as :func:`stated`.
        left: What is not searched, for the comment on top.
        metric: Of ``determined_ds.tune.selection.METRICS``.
        smaller_is_better: Of that metric.
        steps: Steps that are measured.
        warmup: Steps before them.
    """
    orders, unsearched = emitted_orders(base, choices)
    axes = _axes(base, choices) | dict(orders)
    points = math.prod(len(values) for values in axes.values())
    document = applied(base, base.own)
    total = warmup + steps
    changes: list[tuple[KeyPath, Any]] = [
        (("name",), f"{base.experiment.name}_autotune"),
        (("entrypoint",), _entrypoint(base, choices, steps, warmup)),
        (("max_restarts",), 0),
        (("searcher",), NOT_GIVEN),
        (("searcher",), _searcher(points, metric, smaller_is_better, total)),
        (("hyperparameters", "fit"), NOT_GIVEN),
        (("hyperparameters", "fit"), _fit(points, total)),
        (("hyperparameters", "deepspeed_config", "val"), _open_json(document.data, choices)),
    ]
    changes += [(path, _values(values)) for path, values in axes.items()]
    for path, value in changes:
        if value is NOT_GIVEN and document.get(path, NOT_GIVEN) is NOT_GIVEN:
            continue
        if path[-1] == "val":
            document = document.overwritten_all([(path, NOT_GIVEN, ""), (path, value, "")])
        else:
            document = document.overwritten_all([(path, value, "the tuning")])
    head = [
        f"# The tuning of {base.document.name} as a search on a cluster: {points} points, each measured for {steps}",
        f"# steps after {warmup}. Points that cannot run are dropped. The metric is {metric}.",
        *(f"# Not searched: {each.axis}, since {each.reason}." for each in (*left, *unsearched)),
    ]
    return "\n".join(head) + "\n" + stored_yaml(document.data)


def stated(variant: Variant) -> Choice:
    """The choice of a variant that can run, with the micro-batch that it has."""
    assert variant.resolved is not None
    return replace(variant.choice, micro_batch_size=variant.resolved.batch.micro_batch_size)


def _axes(base: Base, choices: Sequence[Choice]) -> dict[KeyPath, list[Any]]:
    """What differs between the choices, as hyperparameters with their values."""

    def of(name: str, absent: Any) -> list[Any]:
        values = [getattr(choice, name) for choice in choices]
        return list(dict.fromkeys(absent if value is None else value for value in values))

    zero = (*OVERWRITE, "zero_optimization")
    optimizer = (*OVERWRITE, "optimizer", "params")
    found: list[tuple[KeyPath, list[Any]]] = [
        (("hyperparameters", "zero_stage"), sorted(of("zero_stage", 0))),
        (("hyperparameters", "micro_batch_size"), sorted(of("micro_batch_size", None))),
        (("hyperparameters", "pipe_parallel_size"), sorted(of("pipe_parallel_size", 1))),
    ]
    if "bf16" in of("precision", ""):
        found.append(((*OVERWRITE, "bf16", "enabled"), [False, True]))
    for name in OFFLOADS:
        if True in of(name, False):
            found.append(((*zero, name, "device"), ["none", "cpu"]))
    own_bucket = base.ds.get("zero_optimization", {}).get("reduce_bucket_size")
    buckets = of("bucket_size", own_bucket if isinstance(own_bucket, int) else DEFAULT_BUCKET)
    if len(buckets) > 1:
        found.append(((*zero, "reduce_bucket_size"), sorted(buckets)))
    if any(choice.fused_optimizer is not None for choice in choices):
        found += [((*optimizer, "torch_adam"), [True]), ((*optimizer, "fused"), [False, True])]
    for name, key in (
        ("torch_compile", "torch_compile"),
        ("activation_checkpointing", base.checkpointing_key),
    ):
        if any(getattr(choice, name) is not None for choice in choices) and key:
            found.append((("hyperparameters", key), [False, True]))
    kernels = of("sdpa_kernel", base.resolved.sdpa_kernel or AUTO)
    if len(kernels) > 1:
        found.append((("hyperparameters", "sdpa_kernel"), kernels))
    return dict(found)


def _values(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else {"type": "categorical", "vals": values}


def _open_json(experiment: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
    """The DeepSpeed JSON without what the points say; with what is offloaded, where they only say whether."""
    ds = experiment["hyperparameters"]["deepspeed_config"]["val"]
    zero = dict(ds["zero_optimization"])
    for name in OFFLOADS:
        if any(getattr(choice, name) for choice in choices):
            zero.setdefault(name, {"device": "none", "pin_memory": "auto"})
    kept = {key: value for key, value in ds.items() if key not in (*BATCH_KEYS, ACCUMULATION)}
    return {**kept, "zero_optimization": zero}


def _entrypoint(base: Base, choices: Sequence[Choice], steps: int, warmup: int) -> Any:
    """The experiment's own, with what makes of it one that measures."""
    stated = base.document.get(("entrypoint",))
    first = base.replicated or base.staged or base.experiment.trial
    more = [MEASURE, str(steps), "--warmup", str(warmup)]
    if base.staged and base.staged != first and any(choice.pipe_parallel_size > 1 for choice in choices):
        more = [PIPELINE_TRIAL, base.staged, *more]
    if isinstance(stated, list):
        return [*(first if word == base.experiment.trial else word for word in stated), *more]
    return " ".join([str(stated).replace(base.experiment.trial, first), *more])


def _searcher(points: int, metric: str, smaller_is_better: bool, total: int) -> dict[str, Any]:
    of_metric = {"metric": metric, "smaller_is_better": smaller_is_better}
    if points <= LARGEST_GRID:
        return {"name": "grid", **of_metric}
    return {
        "name": "adaptive_asha",
        **of_metric,
        "max_trials": LARGEST_GRID,
        "time_metric": "batches",
        "max_time": total,
        "max_rungs": 2,
    }


def _fit(points: int, total: int) -> dict[str, Any]:
    fit: dict[str, Any] = {"max_length": {"batches": total}}
    if points > LARGEST_GRID:  # judged at a quarter of the way, and at the end
        fit["validation_period"] = {"batches": max(1, total // 4)}
    return fit
