"""A DeepSpeed JSON by itself: keys, types, bounds, and the rules that need no experiment to be judged."""

from __future__ import annotations

import dataclasses
import math

from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.batch import BATCH_KEYS, complete_batch
from determined_ds.config.deepspeed.old_names import old_names
from determined_ds.config.reconcile import reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem

# Of the experiment that will name it: what nothing determines yet, a hyperparameter will.
OF_THE_EXPERIMENT = "auto-undetermined"


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a DeepSpeed JSON in every experiment that could name it.

    It is judged by ``reconcile``, on GPUs of every ability, as many as its own batch asks for.

    Returns:
        Errors, and warnings.
    """
    written = ds
    numbers = {name: ds.get((key,)) for key, name in BATCH_KEYS.items()}
    numbers = {name: n for name, n in numbers.items() if isinstance(n, int) and n is not True and n > 0}
    hyperparameters: dict[str, int] = {}
    problems: list[Problem] = []
    slots = _secondary_partition(ds)
    if "global_batch_size" not in numbers:
        hyperparameters["global_batch_size"] = math.prod(numbers.values()) * slots
    elif len(numbers) > 1:
        try:
            batch = complete_batch(**{"micro_batch_size": 1, "accumulation": 1, **numbers})
            slots = batch.replicas if len(numbers) == len(BATCH_KEYS) else 1
        except ConfigError as error:
            problems += [_as_deepspeed_says(problem) for problem in error.problems]
            for key in BATCH_KEYS:
                ds = ds.overwritten((key,), 1, ds.origin((key,)))
            slots = 1
    given = Document(name="hyperparameters", data=dict(hyperparameters), prefix="hyperparameters")
    try:
        warnings = reconcile(given, ds, slots=slots, accelerator=assumed_cuda(slots)).warnings
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem.code != OF_THE_EXPERIMENT]
        return problems, []
    old = [problem for problem in old_names(written) if problem not in warnings]
    return problems, [*old, *warnings]


def _secondary_partition(ds: Document) -> int:
    """As many slots as ZeRO++ asks for, so that they can be split so."""
    size = ds.get(("zero_optimization", "zero_hpz_partition_size"))
    return size if isinstance(size, int) and 1 <= size <= 2**16 and size is not True else 1


def _as_deepspeed_says(problem: Problem) -> Problem:
    ours, theirs = "global_batch_size", "train_batch_size"
    return dataclasses.replace(problem, key=theirs, fix=problem.fix.replace(ours, theirs))
