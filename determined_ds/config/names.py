"""Hyperparameters by the names of other libraries: read as ours where they mean the same, else refused with ours."""

from __future__ import annotations

from typing import Any, NamedTuple

from determined_ds.config.params import AUTO, HYPERPARAMETERS, OVERWRITES, SHORTHANDS, stated_at
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import NOT_GIVEN, Problem, shown

# Hyperparameters that are read as a value of the DeepSpeed JSON, where that leaves it open.
OF_THE_JSON: dict[str, KeyPath] = {
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "bf16": ("bf16", "enabled"),
    "fp16": ("fp16", "enabled"),
}
_BATCHES = ("global_batch_size", "train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size")
# Hyperparameters that are not read, though their names suggest it -> what to write; and what shows that one is the
# model's own, if it is stated beside it.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_stages": ("pipe_parallel_size", ("pipe_parallel_size",)),
    "batch_size": (
        "global_batch_size (samples of an optimizer step, all replicas) or micro_batch_size (of a forward pass of one)",
        _BATCHES,
    ),
    "ds_config": ("deepspeed_config: the path of the JSON in the context directory", ()),
    "zero_optimization": ("overwrite_deepspeed_args: {zero_optimization: {...}}", ()),
    **{
        name: (f"overwrite_deepspeed_args: {{zero_optimization: {{{name}: {{device: cpu}}}}}}", ())
        for name in ("offload_optimizer", "offload_param")
    },
    "slots_per_trial": ("resources.slots_per_trial, beside hyperparameters", ()),
}


class RealNames(NamedTuple):
    """An experiment's point by real names.

    Args:
        hyperparameters: With each value also at the name that the library reads.
        ds: The DeepSpeed JSON, with what hyperparameters say of it.
        problems: Names that are refused, and values that differ from those at the real name.
        warnings: Of each name that was taken as another.
    """

    hyperparameters: Document
    ds: Document
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def by_real_names(hyperparameters: Document, ds: Document | None = None) -> RealNames:
    """Read what is stated by another name.

    Args:
        hyperparameters: One point, as written.
        ds: The DeepSpeed JSON as written; None where only hyperparameters matter.
    """
    ds = Document(name="", data={}) if ds is None else ds
    data = hyperparameters.data
    taken = [name for name in data if name in HYPERPARAMETERS or name in OF_THE_JSON]
    refused = [name for name in data if name in REFUSED]
    if not taken and not refused:
        return RealNames(hyperparameters, ds)
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for name in taken:
        value = data[name]
        if value is None or value == AUTO:
            continue
        real, stated, origin = _real(name, hyperparameters, ds)
        if stated is None:
            place = hyperparameters.origin((name,))
            origin = place if place.startswith("--") else place.reworded(f"{name}, {place}")
            if name in HYPERPARAMETERS:
                hyperparameters = hyperparameters.overwritten((real,), value, origin)
            else:
                ds = ds.overwritten(OF_THE_JSON[name], value, origin)
            if real != name:
                fix = f"write {real}" if name in HYPERPARAMETERS else f"write {OVERWRITES}.{real}"
                warnings.append(hyperparameters.problem((name,), f"is taken as {real}", fix, "other-name"))
        elif stated != value or isinstance(stated, bool) != isinstance(value, bool):
            message = f"is another name of {real}, which is {shown(stated)} ({origin})"
            fix = f"keep {real} only"
            if name in OF_THE_JSON:
                fix += f", or set {OVERWRITES}.{real}, which overwrites the JSON"
            problems.append(hyperparameters.problem((name,), message, fix, "other-name"))
    for name in refused:
        write, beside = REFUSED[name]
        over = hyperparameters.get((OVERWRITES,))
        stated_beside = (data, ds.data, over if isinstance(over, dict) else {})
        if any(each.get(other) not in (None, AUTO) for other in beside for each in stated_beside):
            continue  # the model's own
        fix = f"write {write}"
        if beside:
            example = f"{beside[0]}: 1" if name == "num_stages" else beside[0]
            fix += f"; if it is the model's own, state {example} beside it"
        problems.append(hyperparameters.problem((name,), "is not read by this library", fix, "other-name"))
    return RealNames(hyperparameters, ds, tuple(problems), tuple(warnings))


def _real(name: str, hyperparameters: Document, ds: Document) -> tuple[str, Any, str]:
    """The real name, and the value that is stated there with its origin; None where that is open."""
    if name in HYPERPARAMETERS:
        real = HYPERPARAMETERS[name]
        value = hyperparameters.get((real,))
        return real, None if value == AUTO else value, hyperparameters.origin((real,))
    path = OF_THE_JSON[name]
    named = [(hyperparameters, (short,)) for short, of in SHORTHANDS.items() if of == path]
    for document, place in (*named, (hyperparameters, (OVERWRITES, *path)), (ds, path)):
        value = stated_at(document, place)
        if value is not None:
            return dotted(path), value, document.origin(place)
    return dotted(path), None, ""


def with_real_names(experiment: Document) -> Document:
    """An experiment whose hyperparameters have their real names only, so that others can overwrite them.

    What stands for a value of the DeepSpeed JSON is in ``overwrite_deepspeed_args``.

    Args:
        experiment: Its YAML, with no name that :func:`by_real_names` refuses.
    """
    root = "hyperparameters"
    is_wrapped = experiment.get((root, OVERWRITES, "type")) == "const"
    over: KeyPath = (OVERWRITES, "val") if is_wrapped else (OVERWRITES,)
    changes: list[tuple[KeyPath, Any, str]] = []
    for name, value in (experiment.get((root,)) or {}).items():
        real_name = HYPERPARAMETERS.get(name, name)
        in_json = {**SHORTHANDS, **OF_THE_JSON}.get(real_name)
        real: KeyPath = (*over, *in_json) if in_json else (real_name,) if real_name != name else ()
        if real:
            origin = experiment.origin((root, name))
            if experiment.get((root, *real)) in (None, AUTO):
                changes.append(((root, *real), value, origin.reworded(f"{name}, {origin}")))
            changes.append(((root, name), NOT_GIVEN, ""))
    return experiment.overwritten_all(changes) if changes else experiment
