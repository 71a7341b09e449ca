"""``hyperparameters.fit`` as arguments of transformers: how long to train, and when to evaluate, save and log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_ds.config.params import Duration, FitOptions, Length
from determined_ds.documents.document import Document
from determined_ds.errors import Problem

# Of fit -> the beginning of two arguments: NAME_strategy and NAME_steps.
PERIODS = {"validation_period": "eval", "checkpoint_period": "save", "reporting_period": "logging"}
NOT_HERE = "transformers has no such period"


def fields_of_fit(fit: FitOptions, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``fit`` determines.

    Args:
        fit: As it was read.
        stated: ``hyperparameters.fit`` as it is written; only what stands there is handed on.
    """
    fields: dict[str, Any] = {}
    if fit.max_length is not None:
        by_batches = fit.max_length.unit == "batches"
        fields["max_steps"] = fit.max_length.value if by_batches else -1
        if not by_batches:
            fields["num_train_epochs"] = fit.max_length.value
    for name, start in PERIODS.items():
        period: Length | Duration | None = getattr(fit, name)
        if not isinstance(period, Length) or not isinstance(period.value, int):
            continue
        if period.unit == "batches":
            fields[f"{start}_strategy"], fields[f"{start}_steps"] = "steps", period.value
        elif period.value == 1:
            fields[f"{start}_strategy"] = "epoch"
    if fit.step_zero_validation:
        fields["eval_on_start"] = True
    if fit.save_total_limit is not None:
        fields["save_total_limit"] = fit.save_total_limit
    return {name: value for name, value in fields.items() if stated}


def length_problems(hyperparameters: Document, fit: FitOptions) -> list[Problem]:
    """What of ``fit`` transformers cannot do: a list of numbers, a period of several epochs, a time; asynchronous
    checkpoints."""
    problems = []
    if fit.asynchronous_checkpoints:
        path, message = (
            ("fit", "asynchronous_checkpoints"),
            "transformers writes its checkpoints itself, and at once",
        )
        problems.append(hyperparameters.problem(path, message, "leave it out", "hf-asynchronous"))
    for name in PERIODS:
        period: Length | Duration | None = getattr(fit, name)
        if period is None:
            continue
        if isinstance(period, Duration):
            message, fix = f"{NOT_HERE}: a time", f"write {name}: {{batches: N}}"
            problems.append(hyperparameters.problem(("fit", name), message, fix, "hf-period"))
        elif not isinstance(period.value, int):
            fix = f"write a period: {name}: {{{period.unit}: {period.value[0]}}}"
            problems.append(hyperparameters.problem(("fit", name), f"{NOT_HERE}: a list", fix, "hf-period"))
        elif period.unit == "epochs" and period.value != 1:
            fix = f"write {name}: {{epochs: 1}}, or a number of batches"
            message = f"{NOT_HERE}: several epochs"
            problems.append(hyperparameters.problem(("fit", name), message, fix, "hf-period"))
    return problems


def length_of_fields(values: Mapping[str, Any]) -> dict[str, int] | None:
    """``fit.max_length`` as the arguments state it; None where that is not a whole number."""
    steps, epochs = values.get("max_steps") or -1, values.get("num_train_epochs")
    if steps > 0:
        return {"batches": int(steps)}
    return {"epochs": int(epochs)} if epochs and epochs >= 1 and epochs == int(epochs) else None
