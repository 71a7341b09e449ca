"""Metrics that a trial's ``validation_metrics`` declares, those over all predictions of all ranks among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from determined import pytorch

from determined_ds.errors import TrainingError, TrialError
from determined_ds.train.group.collectives import as_chief
from determined_ds.train.loop.custom_reducers import plain
from determined_ds.trial.author import described, failed, metrics_source, wrong

Reducer = pytorch.Reducer
NAME = "validation_metrics"
WORDS = {"mean": Reducer.AVG, "sum": Reducer.SUM, "max": Reducer.MAX, "min": Reducer.MIN}
MOST_TESTED = 16
METHODS = ("evaluate", "evaluate_batch")
FIX = 'return tensors with a row for each prediction: {"validation_auc": (scores, labels)}'


class DeclaredMetrics:
    """How each metric of a validation is reduced.

    Args:
        trial: The trial; its ``validation_metrics`` may be a mapping.
        in_batches: Whether it validates batch by batch, on ranks that hold the whole model.

    Raises:
        TrialError: a name is declared as something else.

    Attributes:
        reducers: Name -> Determined's reducer, for what is reduced batch by batch.
    """

    def __init__(self, trial: Any, *, in_batches: bool) -> None:
        declared = getattr(trial, NAME, ())
        self._trial = trial
        self._names = tuple(declared) if isinstance(declared, Mapping) else ()
        self._of_all: dict[str, Callable[..., Any]] = {}
        self.reducers: dict[str, Reducer] = {}
        for name in self._names:
            how = declared[name]
            if isinstance(how, Reducer) or (isinstance(how, str) and how in WORDS):
                self.reducers[name] = WORDS[how] if isinstance(how, str) else how
            elif callable(how) or _is_updated(how):
                self._of_all[name] = how
            else:
                expected = "'mean', 'sum', 'max', 'min', a function, or an object with update and compute"
                fix = f'write {NAME} = {{"{name}": "mean"}}'
                raise TrialError(
                    wrong(trial, NAME, how, expected, fix, did=f"declares {name!r} as {described(how)}")
                )
        if self._of_all and not in_batches:
            did = f"declares {', '.join(self._of_all)} over all predictions"
            expected = "'mean', 'sum', 'max' or 'min' in a pipeline and with evaluate_full_dataset"
            fix = "compute it in evaluate_full_dataset, or train without pipeline stages"
            raise TrialError(wrong(trial, NAME, None, expected, fix, did=did))
        self.forget()

    @property
    def test_batches(self) -> int:
        """Batches that ``--test`` validates: an AUC, for example, needs samples of both classes."""
        return MOST_TESTED if self._of_all else 1

    def forget(self) -> None:
        """Begin a validation."""
        self._kept: list[tuple[int, dict[str, Any]]] = []

    def with_reducers(self, reducers: Any) -> Any:
        """What ``evaluation_reducer`` returned, with the declared reducers added.

        Raises:
            TrialError: it states one for all metrics, and others are declared.
        """
        if isinstance(reducers, Mapping):
            return {**self.reducers, **reducers}
        if not self.reducers or reducers == Reducer.AVG:
            return self.reducers or reducers
        fix = f"declare every metric in {NAME}, without evaluation_reducer"
        raise TrialError(wrong(self._trial, "evaluation_reducer", reducers, f"none beside {NAME}", fix))

    def take(self, metrics: dict[str, Any], index: int, *, counts: bool) -> dict[str, Any]:
        """Keep what belongs to metrics over all predictions. Returns the other metrics of a batch.

        Args:
            metrics: What ``evaluate`` returned.
            index: Of the batch among those of this rank.
            counts: Whether this rank's samples count, and are not padding.
        """
        if not self._of_all:
            return metrics
        kept = {name: self._rows(name, metrics[name]) for name in self._of_all if name in metrics}
        if counts and kept:
            self._kept.append((index, kept))
        return {name: value for name, value in metrics.items() if name not in self._of_all}

    def _rows(self, name: str, value: Any) -> Any:
        """A value as tensors on the host, in the form in which the function takes them."""
        if isinstance(value, Mapping):
            return {key: self._row(name, each) for key, each in value.items()}
        if isinstance(value, (tuple, list)) and all(isinstance(v, (torch.Tensor, np.ndarray)) for v in value):
            return [self._row(name, each) for each in value]
        return [self._row(name, value)]

    def _row(self, name: str, value: Any) -> torch.Tensor:
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        if not is_array or not value.ndim:
            did = f"returned {described(value)} for {name!r}, which {NAME} declares over all predictions"
            raise failed(self._trial, METHODS[0], value, "tensors with a row for each", FIX, did=did)
        tensor = torch.as_tensor(value).detach().cpu()
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def compute(self, distributed: Any, replica: int) -> dict[str, Any]:
        """The metrics over all predictions, in the order of the data; a collective. Computed on the chief.

        Args:
            distributed: The ranks.
            replica: Of this rank, data-parallel; batches of replicas follow each other.
        """
        if not self._of_all:
            return {}
        own = [(index, replica, kept) for index, kept in self._kept]
        gathered = distributed.gather(own)
        self.forget()
        return dict(as_chief(distributed, lambda: self._computed(gathered)))

    def _computed(self, gathered: list[list[tuple[int, int, dict[str, Any]]]]) -> dict[str, Any]:
        batches = sorted((each for own in gathered for each in own), key=lambda each: each[:2])
        found: dict[str, Any] = {}
        for name, how in self._of_all.items():
            values = [kept[name] for _, _, kept in batches if name in kept]
            if not values:
                continue
            with torch.no_grad():
                found[name] = _call(how, self._joined(name, values))
        return plain(found, f"{type(self._trial).__name__}.{NAME}")

    def _joined(self, name: str, values: list[Any]) -> Any:
        try:
            if isinstance(values[0], dict):
                return {key: torch.cat([value[key] for value in values]) for key in values[0]}
            return [torch.cat(column) for column in zip(*values, strict=True)]
        except (RuntimeError, KeyError, ValueError) as error:
            source = metrics_source(self._trial, *METHODS)
            raise TrainingError(
                f"{source}: the values of {name!r} cannot be joined over batches: {error}\n"
                "  fix: return the same tensors for each batch, without padding: scores[mask], labels[mask]"
            ) from error

    def check_reported(self, metrics: Mapping[str, Any]) -> None:
        """A declared name that is not reported is misspelled."""
        for name in self._names:
            if name not in metrics:
                did = f"names {name!r}, which is not reported"
                fix = f"use: {', '.join(metrics) or 'none'}"
                raise failed(self._trial, NAME, None, "names of reported metrics", fix, did=did)


def _is_updated(how: Any) -> bool:
    return callable(getattr(how, "update", None)) and callable(getattr(how, "compute", None))


def _call(how: Any, joined: Any) -> Any:
    """Apply a function, or an object that is updated, to all predictions at once."""
    positional = () if isinstance(joined, dict) else joined
    named = joined if isinstance(joined, dict) else {}
    if not _is_updated(how):
        return how(*positional, **named)
    members = how.values() if isinstance(how, Mapping) else (how,)
    for metric in members:
        if hasattr(metric, "sync_on_compute"):
            metric.sync_on_compute = False  # torchmetrics would wait for the other ranks
    if hasattr(how, "reset"):
        how.reset()
    how.update(*positional, **named)
    return how.compute()
