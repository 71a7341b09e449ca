"""One pass over the validation data: every sample counts once, for any number of ranks and any micro-batch size."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util
from determined.pytorch import deepspeed as det_ds
from torch.utils._pytree import tree_leaves, tree_map

from determined_ds.errors import TrainingError, TrialError
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.loaders import build_loader
from determined_ds.train.data.samples import Calls, Share
from determined_ds.train.data.streams import check_first_rows
from determined_ds.train.group.process_group import as_chief
from determined_ds.train.loop.metrics import MetricSums, Reducer, Reducers, plain
from determined_ds.trial import returned
from determined_ds.trial.returned import described, failed, method_of, wrong

METHODS = ("evaluate_batch", "evaluate", "loss")
ARRAYS = (torch.Tensor, np.ndarray)


class Validator:
    """Runs a trial's ``evaluate_batch`` (or ``evaluate_full_dataset``) over its validation data; made by all ranks."""

    def __init__(self, trial: Any, context: Any, note: Callable[[str], None], *, test_mode: bool) -> None:
        self._trial, self._context, self._note, self._test_mode = trial, context, note, test_mode
        self._full_dataset = util.is_overridden(trial.evaluate_full_dataset, det_ds.DeepSpeedTrial)
        self._pipelines = [model for model in context.models if isinstance(model, PipelineEngine)]
        self._metrics = ValidationMetrics(
            trial, context, in_batches=not (self._full_dataset or self._pipelines)
        )
        self._takes_index = util.has_param(trial.evaluate_batch, "batch_idx", 2)
        self._reducers = Reducers(context)
        self._reducers.state_dict()  # a reducer that cannot be copied fails now, before anything is trained
        if self._full_dataset:
            resolved, shared = context.resolved, ("expert", "model", "sequence")
            degrees = [getattr(resolved.strategy, f"{name}_parallel_size") for name in shared]
            if resolved.zero_stage == 3 or context.use_pipeline_parallel or max(degrees) > 1:
                raise TrainingError(
                    "evaluate_full_dataset runs on the chief alone, which hangs where ranks compute a batch together "
                    "(ZeRO 3; pipeline, expert, tensor and sequence parallel): define evaluate_batch instead"
                )
        self.dataset: Any = None
        self._share: Share | None = None
        mpu = context._mpu
        if mpu.should_build_data_loader:
            loader = build_loader(trial, context, "build_validation_data_loader", note)
            self.dataset = getattr(loader, "dataset", None)
            # All of it on the chief, for evaluate_full_dataset; a share of it on each replica otherwise.
            self._share = Share(
                loader,
                replica=0 if self._full_dataset else mpu.data_parallel_rank,
                replicas=1 if self._full_dataset else mpu.data_parallel_world_size,
                seed=context.get_trial_seed(),
                length_of=trial.get_batch_length,
            )
        speaks = self._share is not None and mpu.should_report_metrics
        sizes = self._share.sizes if self._share else []
        ranks = context.distributed.allgather((mpu.data_parallel_rank if speaks else None, sizes))
        # Of the ranks that hold one replica, only the last counts: all of them report the same samples.
        counting = {replica: rank for rank, (replica, _) in enumerate(ranks) if replica is not None}
        self.counts = context.distributed.rank in counting.values()
        self._sizes = None if any(sizes is None for _, sizes in ranks) else [sizes for _, sizes in ranks]
        self._is_checked = False  # whether all ranks read the same stream

    @torch.no_grad()
    def run(self, callbacks: list[Any]) -> dict[str, Any]:
        """Validate; a collective. Returns the metrics, the same on every rank."""
        context = self._context
        for model in context.models:
            model.eval()
        # The reducers keep what they hold of the training since the last report.
        with self._reducers.kept(), evaluating(self._pipelines):
            context.reset_reducers()
            for callback in callbacks:
                callback.on_validation_start()
            metrics = self._on_chief() if self._full_dataset else self._in_batches(callbacks)
            # Every rank takes part: a custom reducer gathers from all of them.
            metrics.update(context.reduce_metrics(for_training=False))
        metrics = context.distributed.broadcast(metrics)
        self._metrics.check_names(metrics)
        for model in context.models:
            model.train()
        for callback in callbacks:
            callback.on_validation_end(metrics)
        return metrics

    def _on_chief(self) -> dict[str, Any]:
        if self._context.distributed.rank != 0:
            return {}
        name = "evaluate_full_dataset"
        with HEART.patiently():
            metrics = self._trial.evaluate_full_dataset(self._share)
        return plain(returned.metrics(self._trial, metrics, name), method_of(self._trial, name))

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        trial, context, outputs = self._trial, self._context, list[Any]()
        self._metrics.begin()
        at_most = context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else 1
        batches = Calls(self._share, self._sizes, context.distributed, at_most=at_most)
        for index in range(self._metrics.test_batches) if self._test_mode else itertools.count():
            if not (count := batches.next_call()):
                break
            if not self._is_checked:
                self._is_checked = True
                check_first_rows(batches.firsts, self._note)
            before, batches.weights = batches.taken, []
            for engine in self._pipelines:
                engine.micro_batches = count
            with self._reducers.kept() if batches.exhausted else contextlib.nullcontext():
                given = (batches, index) if self._takes_index else (batches,)
                metrics = trial.evaluate_batch(*given)
            if self._share is None:  # a pipeline's middle stage: keep step with the stages that load
                batches.skip(count)
            elif batches.taken == before:
                did, fix = "took no batch from its iterator", "call next(dataloader_iter)"
                raise failed(trial, METHODS[0], None, "one or more", fix, did=did)
            reports, weight = context._mpu.should_report_metrics, sum(batches.weights)
            metrics = returned.metrics(trial, metrics, *METHODS) if reports else {}
            metrics = self._metrics.add(metrics, weight if self.counts else 0, index)
            if weight:
                outputs.append(metrics)
            HEART.beat()
        for callback in callbacks:
            callback.on_validation_epoch_end(outputs)
        return self._metrics.reduce()


@contextlib.contextmanager
def evaluating(engines: list[Any]) -> Iterator[None]:
    """Let pipelines take other numbers and sizes of micro-batches than in training.

    ``micro_batches`` is how many ``eval_batch`` takes by default, ``dynamic_shape`` sends every shape along instead of
    the first alone, ``is_data_parallel`` averages over replicas, which the loop does itself.

    Source: ``PipelineEngine`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
    """
    names = ("micro_batches", "dynamic_shape", "is_data_parallel")
    saved = [{name: getattr(engine, name) for name in names} for engine in engines]
    for engine in engines:
        engine.dynamic_shape, engine.is_data_parallel = True, False
    try:
        yield
    finally:
        for engine, values in zip(engines, saved, strict=True):
            vars(engine).update(values)
            engine.reset_activation_shape()


DECLARED, REDUCER = "validation_metrics", "evaluation_reducer"
WORDS = {"mean": Reducer.AVG, "sum": Reducer.SUM, "max": Reducer.MAX, "min": Reducer.MIN}


class ValidationMetrics:
    """The metrics of a validation, each reduced as the trial says: over batches and ranks, or over all predictions."""

    def __init__(self, trial: Any, context: Any, *, in_batches: bool) -> None:
        declared = getattr(trial, DECLARED, ())
        self._trial, self._context = trial, context
        self._declared = dict(declared if isinstance(declared, Mapping) else {})
        self._stated: Any = Reducer.AVG  # by the method
        self._of_all: dict[str, Any] = {}
        for name, how in self._declared.items():
            if str(how) in WORDS or isinstance(how, Reducer):
                continue
            if not callable(how):
                did, fix = f"declares {name!r} otherwise", f'write {DECLARED} = {{"{name}": "mean"}}'
                expected = "'mean', 'sum', 'max', 'min', or a function"
                raise TrialError(wrong(trial, DECLARED, how, expected, fix, did=did))
            self._of_all[name] = how
        if self._of_all and not in_batches:
            did = f"declares {', '.join(self._of_all)} over all predictions"
            expected = "'mean', 'sum', 'max' or 'min' in a pipeline and with evaluate_full_dataset"
            fix = "compute it in evaluate_full_dataset, or train without pipeline stages"
            raise TrialError(wrong(trial, DECLARED, None, expected, fix, did=did))
        # Batches that ``--test`` validates: an AUC, for example, needs samples of both classes.
        self.test_batches = 16 if self._of_all else 1

    def begin(self) -> None:
        """Begin a validation."""
        reducers = {name: WORDS.get(str(how), how) for name, how in self._declared.items()}
        reducers = {name: how for name, how in reducers.items() if name not in self._of_all}
        self._stated = stated = self._trial.evaluation_reducer()
        if isinstance(stated, Mapping):
            reducers |= {name: Reducer(how) for name, how in stated.items()}
        elif reducers and stated != Reducer.AVG:
            expected, fix = (
                f"none beside {DECLARED}",
                f"declare all in {DECLARED}, without evaluation_reducer",
            )
            raise TrialError(wrong(self._trial, REDUCER, stated, expected, fix))
        source = method_of(self._trial, *METHODS)
        self._sums = MetricSums(self._context.device, reducers or Reducer(stated), source=source)
        self._kept: list[
            tuple[int, int, dict[str, Any]]
        ] = []  # of all predictions: batch, replica, values by name

    def add(self, metrics: dict[str, Any], weight: float, index: int) -> dict[str, Any]:
        """Add those of a batch. Returns those that are not over all predictions."""
        kept = {name: metrics[name] for name in self._of_all if name in metrics}
        for name, value in kept.items():
            if not all(isinstance(each, ARRAYS) and each.ndim for each in tree_leaves(value)):
                did = f"returned {described(value)} for {name!r}, which {DECLARED} declares over all predictions"
                fix = 'return tensors with a row for each prediction: {"validation_auc": (scores, labels)}'
                raise failed(self._trial, "evaluate", value, "tensors with a row for each", fix, did=did)
        if weight and kept:
            kept = tree_map(lambda value: torch.as_tensor(value).detach().cpu(), kept)
            # numpy, which most functions compute in, has no bfloat16
            kept = tree_map(lambda value: value.float() if value.dtype == torch.bfloat16 else value, kept)
            self._kept.append((index, self._context._mpu.data_parallel_rank, kept))
        metrics = {name: value for name, value in metrics.items() if name not in kept}
        self._sums.add(metrics, weight)
        return metrics

    def reduce(self) -> dict[str, Any]:
        """Those over all batches and ranks; a collective."""
        reduced = self._sums.reduce()[0]
        if not self._of_all:
            return dict(reduced)
        gathered, self._kept = self._context.distributed.gather(self._kept), []

        @torch.no_grad()
        def computed() -> dict[str, Any]:
            batches = sorted((each for own in gathered for each in own), key=lambda each: each[:2])
            found: dict[str, Any] = {}
            for name, how in self._of_all.items():
                values = [kept[name] for _, _, kept in batches if name in kept]
                if not values:
                    continue
                whole = tree_map(lambda *parts: torch.cat(parts), *values)  # by name, in order, or one
                if isinstance(whole, Mapping):
                    found[name] = how(**whole)
                else:
                    found[name] = how(*whole) if isinstance(whole, (tuple, list)) else how(whole)
            return plain(found, f"{type(self._trial).__name__}.{DECLARED}")

        return reduced | as_chief(self._context.distributed, computed)

    def check_names(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a name that is not reported: it is misspelled."""
        stated = self._stated if isinstance(self._stated, Mapping) else {}
        for method, names in ((DECLARED, self._declared), (REDUCER, stated)):
            if unknown := [name for name in names if name not in metrics]:
                did = f"names {unknown[0]!r}, which is not reported"
                fix = f"use: {', '.join(metrics)}" if metrics else "return this metric from the validation"
                raise failed(self._trial, method, unknown[0], "names of reported metrics", fix, did=did)
