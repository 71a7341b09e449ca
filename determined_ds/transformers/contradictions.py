"""What an experiment and the arguments of transformers must agree on, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from determined_ds.config.params import parse_hyperparameters
from determined_ds.documents.document import Document
from determined_ds.errors import Problem, shown
from determined_ds.transformers.filling import ARGUMENTS, STATED_TWICE
from determined_ds.transformers.lengths import fields_of_fit, length_of_fields

TAKE_OURS = "use determined_ds.transformers.TrainingArguments, which takes the hyperparameters"
ASHA = ("adaptive_asha", "async_halving")
# What transformers calls a tool -> what hyperparameters.logging calls it.
REPORTERS = {"wandb": "wandb", "mlflow": "mlflow"}
OWN_UNITS = ("batches", "epochs")


def value_of(value: Any) -> Any:
    """A value of an argument, of an enum the text."""
    return getattr(value, "value", value)


def eval_strategy(args: Any) -> str:
    """``eval_strategy``, by its older name in transformers 4.40."""
    return str(value_of(getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")))


def searcher_problems(searcher: dict[str, Any], args: Any) -> Iterator[Problem]:
    """Why the searcher would not get its metric, or not at the times that it expects.

    Args:
        searcher: ``searcher`` of the experiment.
        args: The arguments of transformers.
    """
    metric = searcher.get("metric")
    if metric and not str(metric).startswith("eval_"):
        guess = f"eval_{str(metric).removeprefix('validation_')}"
        yield Problem(
            key="searcher.metric",
            value=metric,
            message="transformers reports metrics of evaluations as eval_NAME",
            fix=f"write {guess}",
            code="searcher-metric",
        )
    elif metric and eval_strategy(args) == "no":
        yield Problem(
            key=f"{ARGUMENTS}.eval_strategy",
            value="no",
            message=f"nothing is evaluated, so searcher.metric = {metric} is never reported",
            fix='eval_strategy="steps" and eval_steps=N, or hyperparameters.fit.validation_period: {batches: N}',
            code="searcher-metric",
        )
    yield from _other_best(searcher, args)
    yield from _length_problems(searcher, args)


def _other_best(searcher: dict[str, Any], args: Any) -> Iterator[Problem]:
    """transformers and the searcher would keep different checkpoints as the best."""
    metric, named = searcher.get("metric"), args.metric_for_best_model
    if not metric or not named:
        return
    if f"eval_{str(named).removeprefix('eval_')}" != metric:
        key, value = f"{ARGUMENTS}.metric_for_best_model", named
        message, fix = f"differs from searcher.metric = {metric}", f"write {metric}, or leave it out"
        yield Problem(key=key, value=value, message=message, fix=fix, code=STATED_TWICE)
        return
    larger = searcher.get("smaller_is_better") is False
    if args.greater_is_better is not None and bool(args.greater_is_better) != larger:
        key, value = f"{ARGUMENTS}.greater_is_better", args.greater_is_better
        message = f"contradicts searcher.smaller_is_better = {shown(not larger)}"
        fix = f"write {larger}, or leave it out"
        yield Problem(key=key, value=value, message=message, fix=fix, code=STATED_TWICE)


def _length_problems(searcher: dict[str, Any], args: Any) -> Iterator[Problem]:
    """``searcher.max_time`` and the deprecated ``searcher.max_length`` must be the length of training."""
    length = length_of_fields(vars(args))
    key = wanted = None
    if searcher.get("max_length") is not None:
        key, wanted = "searcher.max_length", searcher["max_length"]
    elif (
        searcher.get("name") in ASHA and searcher.get("time_metric") in OWN_UNITS and searcher.get("max_time")
    ):
        key, wanted = "searcher.max_time", {searcher["time_metric"]: searcher["max_time"]}
    if key is not None and wanted != length:
        now = (
            f"max_steps={args.max_steps}"
            if args.max_steps > 0
            else f"num_train_epochs={args.num_train_epochs}"
        )
        message = f"differs from the length of training, {ARGUMENTS}({now})"
        yield Problem(
            key=key, value=wanted, message=message, fix="state one length in both", code=STATED_TWICE
        )


def reported_twice(hyperparameters: Document, args: Any) -> Iterator[Problem]:
    """Tools that ``hyperparameters.logging`` reports to, and transformers' own callbacks would too.

    Args:
        hyperparameters: The trial's.
        args: The arguments.
    """
    tools = parse_hyperparameters(hyperparameters).logging
    for name in args.report_to or ():
        if REPORTERS.get(name) in tools:
            message = (
                f"hyperparameters.logging.{REPORTERS[name]} reports there too: the run would be there twice"
            )
            fix = 'write report_to="none", or remove it from hyperparameters.logging'
            yield Problem(
                key=f"{ARGUMENTS}.report_to", value=name, message=message, fix=fix, code=STATED_TWICE
            )


def hyperparameter_problems(hyperparameters: Document, args: Any) -> Iterator[Problem]:
    """Hyperparameters of this library that arguments of transformers' own class did not take.

    Args:
        hyperparameters: The trial's.
        args: The arguments.
    """
    own = parse_hyperparameters(hyperparameters)
    if own.global_batch_size is not None:
        total = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        if total != own.global_batch_size:
            message = (
                f"differs from per_device_train_batch_size x gradient_accumulation_steps x ranks = {total}"
            )
            yield hyperparameters.problem(("global_batch_size",), message, TAKE_OURS, STATED_TWICE)
    for name, value in fields_of_fit(own.fit, hyperparameters.get(("fit",)) or {}).items():
        found = value_of(getattr(args, name, None))
        if found != value and not (name == "max_steps" and value == -1):
            message = f"differs from {ARGUMENTS}.{name} = {shown(found)}"
            yield hyperparameters.problem(("fit",), message, TAKE_OURS, STATED_TWICE)
