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

from determined_ds.errors import TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.loaders import build_loader
from determined_ds.train.data.samples import Calls, Share
from determined_ds.train.data.streams import check_first_rows
from determined_ds.train.group.process_group import as_chief
from determined_ds.train.loop.metrics import MetricSums, Reducer, Reducers, plain
from determined_ds.trial import returned
from determined_ds.trial.returned import check, described, failed, method_of

METHODS, WHOLE = ("evaluate_batch", "evaluate", "loss"), "evaluate_full_dataset"
DECLARED, REDUCER = "validation_metrics", "evaluation_reducer"
WORDS = {"mean": Reducer.AVG, "sum": Reducer.SUM, "max": Reducer.MAX, "min": Reducer.MIN}
ARRAYS = (torch.Tensor, np.ndarray)
TESTED_BATCHES = (
    16  # where a metric is over all predictions: an AUC, for example, needs samples of both classes
)


class Validator:
    """Runs a trial's ``evaluate_batch`` (or ``evaluate_full_dataset``) over its validation data; made by all ranks."""

    def __init__(self, trial: Any, context: Any, note: Callable[[str], None], *, test_mode: bool) -> None:
        self._trial, self._context, self._note, self._test_mode = trial, context, note, test_mode
        self._is_whole = util.is_overridden(trial.evaluate_full_dataset, det_ds.DeepSpeedTrial)
        self._pipelines = [model for model in context.models if isinstance(model, PipelineEngine)]
        declared = getattr(trial, DECLARED, ())
        self._named = dict.fromkeys(declared if isinstance(declared, Mapping) else (), DECLARED)
        self._reduced: dict[str, Reducer] = {}  # over batches and ranks
        self._of_all: dict[str, Callable[..., Any]] = {}  # over all predictions
        for name in self._named:
            how = WORDS.get(str(declared[name]), declared[name])
            did, fix = f"declares {name!r} otherwise", f'write {DECLARED} = {{"{name}": "mean"}}'
            expected = "'mean', 'sum', 'max', 'min', or a function"
            check(isinstance(how, Reducer) or callable(how), trial, DECLARED, how, expected, fix, did)
            (self._reduced if isinstance(how, Reducer) else self._of_all)[name] = how
        did = f"declares {', '.join(self._of_all)} over all predictions"
        expected = "'mean', 'sum', 'max' or 'min' in a pipeline and with evaluate_full_dataset"
        fix = "compute it in evaluate_full_dataset, or train without pipeline stages"
        in_batches = not (self._is_whole or self._pipelines)
        check(in_batches or not self._of_all, trial, DECLARED, None, expected, fix, did)
        self._takes_index = util.has_param(trial.evaluate_batch, "batch_idx", 2)
        self._reducers = Reducers(context)
        self._reducers.state_dict()  # a reducer that cannot be copied fails now, before anything is trained
        resolved, shared = context.resolved, ("expert", "model", "sequence")
        together = any(getattr(resolved.strategy, f"{name}_parallel_size") > 1 for name in shared)
        if self._is_whole and (together or resolved.zero_stage == 3 or context.use_pipeline_parallel):
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
                replica=0 if self._is_whole else mpu.data_parallel_rank,
                replicas=1 if self._is_whole else mpu.data_parallel_world_size,
                seed=context.get_trial_seed(),
                length_of=trial.get_batch_length,
            )
        speaks = self._share is not None and mpu.should_report_metrics
        sizes = self._share.sizes if self._share else []
        ranks = context.distributed.allgather((mpu.data_parallel_rank if speaks else None, sizes))
        # Of the ranks that hold one replica, only the last counts: all of them report the same samples.
        counting = {replica: rank for rank, (replica, _) in enumerate(ranks) if replica is not None}
        self._counts = context.distributed.rank in counting.values()
        self._sizes = None if any(sizes is None for _, sizes in ranks) else [sizes for _, sizes in ranks]
        self._is_checked = False  # whether all ranks read the same stream

    @torch.no_grad()
    def run(self, callbacks: list[Any]) -> dict[str, Any]:
        """Validate; a collective. Returns the metrics, the same on every rank."""
        context, trial = self._context, self._trial
        for model in context.models:
            model.eval()
        # The reducers keep what they hold of the training since the last report.
        with self._reducers.kept(), evaluating(self._pipelines):
            context.reset_reducers()
            for callback in callbacks:
                callback.on_validation_start()
            metrics: dict[str, Any] = {}
            if not self._is_whole:
                metrics = self._in_batches(callbacks)
            elif context.distributed.rank == 0:
                with HEART.patiently():
                    metrics = trial.evaluate_full_dataset(self._share)
                metrics = plain(returned.metrics(trial, metrics, WHOLE), method_of(trial, WHOLE))
            # Every rank takes part: a custom reducer gathers from all of them.
            metrics.update(context.reduce_metrics(for_training=False))
        metrics = context.distributed.broadcast(metrics)
        for name, method in self._named.items():
            if name not in metrics:  # misspelled
                did = f"names {name!r}, which is not reported"
                fix = f"use: {', '.join(metrics)}" if metrics else "return this metric from the validation"
                raise failed(trial, method, name, "names of reported metrics", fix, did=did)
        for model in context.models:
            model.train()
        for callback in callbacks:
            callback.on_validation_end(metrics)
        return metrics

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        trial, context, outputs = self._trial, self._context, list[Any]()
        stated, source = trial.evaluation_reducer(), method_of(trial, *METHODS)
        by_name = stated if isinstance(stated, Mapping) else {}
        self._named |= dict.fromkeys(by_name, REDUCER)
        reducers = self._reduced | {name: Reducer(how) for name, how in by_name.items()}
        default = Reducer.AVG if by_name is stated else Reducer(stated)
        sums = MetricSums(context.device, source=source, reducers=reducers, default=default)
        predictions = list[tuple[int, int, dict[str, Any]]]()  # batch, replica, values by name
        tested = TESTED_BATCHES if self._of_all else 1
        at_most = context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else 1
        batches = Calls(self._share, self._sizes, context.distributed, at_most=at_most)
        for index in range(tested) if self._test_mode else itertools.count():
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
            metrics = dict(returned.metrics(trial, metrics, *METHODS)) if reports else {}
            rows = {name: metrics.pop(name) for name in self._of_all if name in metrics}
            for name, value in rows.items():
                if not all(isinstance(each, ARRAYS) and each.ndim for each in tree_leaves(value)):
                    did = f"returned {described(value)} for {name!r}, which {DECLARED} declares over all predictions"
                    fix = (
                        'return tensors with a row for each prediction: {"validation_auc": (scores, labels)}'
                    )
                    raise failed(trial, "evaluate", value, "tensors with a row for each", fix, did=did)
            if rows and weight and self._counts:
                rows = tree_map(lambda value: torch.as_tensor(value).detach().cpu(), rows)
                # numpy, which most functions compute in, has no bfloat16
                rows = tree_map(lambda value: value.float() if value.dtype == torch.bfloat16 else value, rows)
                predictions.append((index, context._mpu.data_parallel_rank, rows))
            sums.add(metrics, weight if self._counts else 0)
            if weight:
                outputs.append(metrics)
            HEART.beat()
        for callback in callbacks:
            callback.on_validation_epoch_end(outputs)
        reduced = dict(sums.reduce()[0])
        if not self._of_all:
            return reduced
        gathered = context.distributed.gather(predictions)

        def computed() -> dict[str, Any]:
            in_order = sorted((each for own in gathered for each in own), key=lambda each: each[:2])
            found: dict[str, Any] = {}
            for name, how in self._of_all.items():
                if values := [rows[name] for _, _, rows in in_order if name in rows]:
                    whole = tree_map(lambda *parts: torch.cat(parts), *values)  # arguments, or one
                    found[name] = how(*whole) if isinstance(whole, (tuple, list)) else how(whole)
            return plain(found, f"{type(trial).__name__}.{DECLARED}")

        return reduced | as_chief(context.distributed, computed)


@contextlib.contextmanager
def evaluating(engines: list[Any]) -> Iterator[None]:
    """Let pipelines take other numbers and sizes of micro-batches than in training."""
    # ``micro_batches`` is how many ``eval_batch`` takes by default, ``dynamic_shape`` sends every shape along instead
    # of the first alone, ``is_data_parallel`` averages over replicas, which the loop does itself.
    # Source: ``PipelineEngine`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
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
