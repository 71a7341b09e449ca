"""Hyperparameters by other names -> by their real ones, or refused with the name to write.

The table is in :mod:`determined_ds.config.aliases`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from determined_ds.config.aliases import HYPERPARAMETERS, OF_THE_JSON, REFUSED, Refused
from determined_ds.config.hyperparameters import OVERWRITES, SHORTHANDS, stated_at
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import NOT_GIVEN, Problem, shown


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


def by_real_names(hyperparameters: Document, ds: Document) -> RealNames:
    """Read what is stated by another name.

    Args:
        hyperparameters: One point, as written.
        ds: The DeepSpeed JSON as written.
    """
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
        real, where = _real(name, hyperparameters, ds)
        stated, origin = where
        if stated is None:
            place = hyperparameters.origin((name,))
            origin = place if place.startswith("--") else place.reworded(f"{name}, {place}")
            if name in HYPERPARAMETERS:
                hyperparameters = hyperparameters.overwritten((real,), value, origin)
            else:
                ds = ds.overwritten(OF_THE_JSON[name], value, origin)
            if (name,) != OF_THE_JSON.get(name):
                is_named_so = real in HYPERPARAMETERS.values() or real in OF_THE_JSON
                fix = f"write {real}" if is_named_so else f"write {OVERWRITES}.{real}"
                warnings.append(hyperparameters.problem((name,), f"is taken as {real}", fix, "other-name"))
        elif stated != value or isinstance(stated, bool) != isinstance(value, bool):
            message = f"is another name of {real}, which is {shown(stated)} ({origin})"
            fix = f"keep {real} only"
            if name in OF_THE_JSON:
                fix += f", or set {OVERWRITES}.{real}, which overwrites the JSON"
            problems.append(hyperparameters.problem((name,), message, fix, "other-name"))
    for name in refused:
        if not _is_own(data[name], REFUSED[name], hyperparameters, ds):
            problems.append(_refused(hyperparameters, name))
    return RealNames(hyperparameters, ds, tuple(problems), tuple(warnings))


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
        real: KeyPath = (real_name,) if real_name != name else ()
        real = (*over, *in_json) if in_json else real
        if real:
            origin = experiment.origin((root, name))
            if experiment.get((root, *real)) in (None, AUTO):
                changes.append(((root, *real), value, origin.reworded(f"{name}, {origin}")))
            changes.append(((root, name), NOT_GIVEN, ""))
    return experiment.overwritten_all(changes) if changes else experiment


def _real(name: str, hyperparameters: Document, ds: Document) -> tuple[str, tuple[Any, str]]:
    """The real name, and the value that is stated there with its origin; None where that is open."""
    if name in HYPERPARAMETERS:
        real = HYPERPARAMETERS[name]
        value = hyperparameters.get((real,))
        return real, (None if value == AUTO else value, hyperparameters.origin((real,)))
    path = OF_THE_JSON[name]
    over: KeyPath = (OVERWRITES, *path)
    named = [(hyperparameters, (laid,)) for laid, of in SHORTHANDS.items() if of == path]
    for document, place in (*named, (hyperparameters, over), (ds, path)):
        value = stated_at(document, place)
        if value is not None:
            return dotted(path), (value, document.origin(place))
    return dotted(path), (None, "")


def _is_own(value: Any, row: Refused, hyperparameters: Document, ds: Document) -> bool:
    """Whether a hyperparameter is the model's own, though it has a name that others use for the library's."""
    if row.kinds and not isinstance(value, row.kinds):
        return True
    for name in row.beside:
        over = hyperparameters.get((OVERWRITES, name))
        if (
            hyperparameters.get((name,)) is not None
            or over is not None
            or ds.get((name,)) not in (None, AUTO)
        ):
            return True
    return False


def _refused(hyperparameters: Document, name: str) -> Problem:
    row = REFUSED[name]
    fix = f"write {row.write}"
    if row.beside:
        example = f"{row.beside[0]}: 1" if name == "num_stages" else row.beside[0]
        fix += f"; if it is the model's own, state {example} beside it"
    return hyperparameters.problem((name,), "is not read by this library", fix, "other-name")
