"""A trial in Determined's own form is trained as long as the experiment says, in keys that only such trials have.

Source: ``_run_deepspeed_trial`` in determined 0.38.1's ``exec/harness.py``; ``TrainUnit._from_values`` in its
``pytorch/_pytorch_trial.py``.
"""

from __future__ import annotations

from typing import Any

from determined_ds.config.keys import ignored_keys
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import EntrypointError, Problem
from determined_ds.experiment.entrypoint import ScriptEntrypoint, read_entrypoint

# Key of the experiment -> argument of fit.
LENGTHS: dict[KeyPath, str] = {
    ("searcher", "max_length"): "max_length",
    ("min_validation_period",): "validation_period",
    ("min_checkpoint_period",): "checkpoint_period",
}
OTHERS: dict[KeyPath, str] = {
    ("checkpoint_policy",): "checkpoint_policy",
    ("perform_initial_validation",): "step_zero_validation",
}
REPORTING: KeyPath = ("scheduling_unit",)
RECORDS: KeyPath = ("records_per_epoch",)  # read by Determined itself for metrics alone
READ = frozenset(".".join(map(str, path)) for path in (*LENGTHS, *OTHERS, REPORTING, RECORDS))
# The Core API hands it on.
READ_BY_SCRIPTS = frozenset({"searcher.max_length"})


def with_fit(hyperparameters: Document, document: Document) -> tuple[Document, list[Problem]]:
    """Hyperparameters whose ``fit`` has what the experiment says in the keys of Determined's own trials.

    Args:
        hyperparameters: One point; what its own ``fit`` states stays.
        document: The experiment's YAML.

    Returns:
        The hyperparameters, and lengths in records whose batch is unknown.
    """
    problems: list[Problem] = []
    stated: dict[KeyPath, tuple[str, Any]] = {}
    for path, name in LENGTHS.items():
        value = document.get(path)
        if isinstance(value, dict) and value.get("records") is not None:
            value = _in_batches(value["records"], hyperparameters, document, path, problems)
        if value not in (None, {}) and value not in ({"batches": 0}, {"epochs": 0}):
            stated[path] = (name, value)
    stated |= {path: (name, document.get(path)) for path, name in OTHERS.items()}
    unit = document.get(REPORTING)
    stated[REPORTING] = ("reporting_period", {"batches": unit} if unit is not None else None)
    for path, (name, value) in stated.items():
        if value is not None and hyperparameters.get(("fit", name)) is None:
            origin = document.origin(path)
            place = origin.reworded(f"{'.'.join(map(str, path))}, {origin}")
            hyperparameters = hyperparameters.overwritten(("fit", name), value, place)
    return hyperparameters, problems


def _in_batches(
    records: Any, hyperparameters: Document, document: Document, path: KeyPath, problems: list[Problem]
) -> Any:
    """A length in records as one in batches, rounded down, at least one; None where it is 0 or cannot be counted."""
    batch = hyperparameters.get(("global_batch_size",))
    if records == 0:
        return None
    if isinstance(records, int) and isinstance(batch, int) and batch > 0:
        return {"batches": max(1, records // batch)}
    message = "records can be counted only where hyperparameters.global_batch_size is a number"
    fix = "write {batches: N}, or state global_batch_size"
    problems.append(document.problem(path, message, fix, "records"))
    return None


def ignored_keys_of(document: Document, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in a place, see ``ignored_keys``.

    Args:
        document: The experiment's YAML, overrides applied.
        place: ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``.
    """
    found = ignored_keys(document, place)
    try:
        entrypoint = read_entrypoint(document.get(("entrypoint",)))
    except EntrypointError:
        return found
    read: frozenset[str] = frozenset()
    if isinstance(entrypoint, ScriptEntrypoint):
        read = READ_BY_SCRIPTS
    elif entrypoint.legacy:
        read = READ
    return [warning for warning in found if warning.key not in read]
