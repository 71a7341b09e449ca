"""What is reported of a run: to the master or the run directory, to TensorBoard, and to the chief's terminal.

There it is a panel, and plain lines where the output is no terminal; other ranks show nothing. The panel is drawn by
the thread that trains, between two batches and at most some times a second: no thread could hold a lock of the terminal
while a data loader forks its workers, and none takes time from a step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from determined_ds.logs.tensorboard import upload, write_scalars
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.report.live import DrawnPanel, RunState, report_line
from determined_ds.rundir.handed_on import PARENT
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.signals import HEART, STOP
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.trial.instruction_times import pipeline_times

TRAINING, VALIDATION = "training", "validation"
DRAWN_EVERY_S = 0.25
# Of the launcher's words about a first Ctrl-C, which it writes once it has sent the signal: an empty line, and they.
ANNOUNCED_LINES, ANNOUNCED_WITHIN_S = 2, 0.1
STOPPING = "stopping    after this batch, with a checkpoint; again ends at once"


class Reporter:
    """Makes reports of the accumulated metrics. Only the chief sends them."""

    def __init__(self, trial: Any, context: Any, progress: Progress) -> None:
        self._context, self._core, self._progress = context, context._core, progress
        self._is_chief = context.distributed.rank == 0
        self._tokens_per_sample: float | None = getattr(trial, "tokens_per_sample", lambda: None)()
        self._training_s = 0.0
        self._num_batches = 0
        self._started: float | None = None
        self.latest: dict[str, Any] = {}
        self.memory_by_rank: tuple[int, ...] = ()

    def batch_begins(self) -> None:
        """A batch is about to be trained: from the first one on, the time until :meth:`pause` is that of training.

        Batches are not timed one by one, since a GPU works on after the call that started its work. How long it took
        is known where the host waits for it, at a report or a pause.
        """
        if self._started is None:
            self._started = time.perf_counter()
        self._num_batches += 1

    def take_back_batch(self) -> int:
        """The batch that has begun is not trained. Returns those that were, since the last report."""
        self._num_batches = max(0, self._num_batches - 1)
        return self._num_batches

    def pause(self) -> None:
        """What follows is not training: a report, a validation, a checkpoint."""
        if self._started is None:
            return
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._training_s += time.perf_counter() - self._started
        self._started = None

    def reduce(self, sums: MetricSums, *riders: torch.Tensor) -> tuple[dict[str, Any], list[list[float]]]:
        """The training metrics since the last report over all ranks, by one collective; and its other riders."""
        context = self._context
        times = pipeline_times(context.models)
        own = [peak_bytes(context.device), *(times.take() if times else ())]
        reduced, rows = sums.reduce(torch.tensor(own, dtype=torch.float64), *riders)
        self.pause()
        peaks, *columns = list(zip(*rows, strict=True))[: len(own)]
        self.memory_by_rank = tuple(map(int, peaks))
        metrics: dict[str, Any] = dict(reduced)
        metrics.update(context.reduce_metrics(for_training=True) or {})
        metrics.update(engine_metrics(context.models[0]))
        # Over replicas: samples are counted once, however many ranks hold a replica.
        seconds, samples = self._training_s, self._num_batches * context.resolved.batch.global_batch_size
        self._training_s, self._num_batches = 0.0, 0
        if seconds:
            metrics["samples_per_second"] = samples / seconds
            if self._tokens_per_sample:
                metrics["tokens_per_second"] = samples / seconds * self._tokens_per_sample
        metrics.update(memory_metrics(self.memory_by_rank))
        if times is not None and (measured := times.bubble(*columns)) is not None:
            metrics |= {"bubble": measured, "bubble_ideal": counted_bubble(times.pipeline)}
        self.latest = metrics
        return metrics, [row[len(own) :] for row in rows]

    def training(self, batches_trained: int, metrics: dict[str, Any], *, progress: float) -> None:
        """Send a report of training metrics."""
        if self._is_chief:
            with HEART.patiently():  # a master may not answer for a while
                self._core.train.report_training_metrics(steps_completed=batches_trained, metrics=metrics)
                self._core.train.report_progress(progress)
            self._show(TRAINING, batches_trained, metrics)

    def validation(self, batches_trained: int, metrics: dict[str, Any]) -> float | None:
        """Send a report of validation metrics."""
        if not self._is_chief:
            return None
        best_before = self._core.train.get_experiment_best_validation()
        self._core.train.report_validation_metrics(steps_completed=batches_trained, metrics=metrics)
        self._show(VALIDATION, batches_trained, metrics)
        return None if best_before is None else float(best_before)

    def _show(self, group: str, batches_trained: int, metrics: dict[str, Any]) -> None:
        if self._context.get_enable_tensorboard_logging():
            write_scalars(self._context.get_tensorboard_writer(), group, batches_trained, metrics)
        self._progress.report(group, batches_trained, metrics)

    def upload(self) -> None:
        """Flush the files for TensorBoard; on a cluster, upload them to its storage."""
        if self._context.get_enable_tensorboard_logging():
            upload(self._context)


def engine_metrics(engine: Any) -> dict[str, Any]:
    """What DeepSpeed reports of the last step: learning rate, gradient norm, loss scale, skipped steps."""
    metrics: dict[str, Any] = {}
    if rates := engine.get_lr() if engine.optimizer is not None else []:
        metrics["lr"] = float(rates[0])
    norm = engine.get_global_grad_norm()
    if norm is not None and math.isfinite(norm):  # inf where the step was skipped: no gradient was applied
        metrics["grad_norm"] = float(norm)
    if engine.fp16_enabled():
        # Optimizers without ZeRO keep it elsewhere than those with; this works for all of them.
        metrics["loss_scale"] = float(engine._get_optimizer_loss_scale())
    if engine.fp16_enabled() or engine.skipped_steps:
        metrics["skipped_steps"] = int(engine.skipped_steps)
    return metrics


# ------------------------------------------------------------------------------------ on the terminal


def make_progress(is_chief: bool, records: Path | None = None) -> Progress:
    """The display of this rank: a panel on the chief's terminal, if it has one.

    Args:
        is_chief: Whether this is rank 0; the others show nothing.
        records: ``metrics.jsonl`` of the run, for what was reported before it was resumed.
    """
    panel = None
    if is_chief and sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown"):
        panel = DrawnPanel()
    return Progress(shows=is_chief, panel=panel, records=records)


class Progress:
    """The display of a rank: with a panel, notes and validations are lines above it; without, each report is a line."""

    def __init__(self, *, shows: bool = True, panel: Any = None, records: Path | None = None) -> None:
        self._shows, self._panel, self._records = shows, panel, records
        self._state = RunState()
        self._width = 1  # of a number of batches
        self._next_s = math.inf  # the panel is not drawn before the start
        self._is_stopping = False
        self._handlers = contextlib.ExitStack()

    def start(
        self, *, total: int | None, done: int, metric: str = "", smaller_is_better: bool = True
    ) -> None:
        """Training goes from batch ``done`` to ``total``, None where that is not known; a validation's ``metric``."""
        self._width = len(str(total or done))
        state = RunState(metric=metric, smaller_is_better=smaller_is_better, total=total, batch=done)
        self._state = state
        if done and total is not None and done >= total:
            self.note(f"resumed at batch {done}; nothing left to train: max_length is {total}")
        elif done:
            self.note(f"resumed at batch {done}{'' if total is None else f' of {total}'}")
        if self._panel is None:
            return
        if done and self._records is not None:
            for record in read_records(self._records):
                state.take(record["group"], record["steps_completed"], record["metrics"])
            state.checkpoint = done
        self._panel.state = state
        self._is_stopping = STOP.is_set()  # then that was announced on a terminal without a panel
        self._panel.start()
        self._handlers.enter_context(_logged_above())
        self._next_s = 0.0

    def step(self, batches_trained: int) -> None:
        """A batch was trained."""
        if self._panel is not None and (now := time.monotonic()) >= self._next_s:
            self._state.at(batches_trained, now)
            self._draw()

    def status(self, status: str) -> None:
        """What is done now: ``training``, ``validating`` or ``checkpointing``."""
        self._state.status = status
        self._draw()

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        """Metrics were reported."""
        self._state.take(group, batches_trained, metrics)
        self._draw(if_due=True)
        if self._panel is None or group != "training":
            self.note(report_line(group, batches_trained, self._state.total, metrics, digits=self._width))

    def checkpoints(self, newest: int | None, writing: int | None) -> None:
        """The batch of the newest checkpoint that is complete, and of one that is written while training continues."""
        state = self._state
        if newest is not None and newest != state.checkpoint:
            state.checkpoint, state.checkpoint_time = newest, time.time()
        state.writing = writing
        self._draw(if_due=True)

    def note(self, text: str) -> None:
        """Show a line that is worth keeping."""
        if self._panel is not None:
            self._take_announcement()
            self._panel.note(text)
        elif self._shows:
            print(text, flush=True)

    def stop(self) -> None:
        """Training is over, successful or not."""
        if self._panel is not None:
            self._take_announcement()
            self._handlers.close()
            self._panel.stop()
            self._next_s = math.inf

    def _draw(self, *, if_due: bool = False) -> None:
        if self._panel is None or not self._panel.is_shown or (if_due and time.monotonic() < self._next_s):
            return
        self._take_announcement()
        self._panel.refresh()
        self._next_s = time.monotonic() + DRAWN_EVERY_S

    def _take_announcement(self) -> None:
        """Move what the launcher has written below the panel, as a stop was requested, above it."""
        if self._is_stopping or not STOP.is_set() or not self._panel.is_shown:
            return
        self._is_stopping = True
        if PARENT in os.environ:
            time.sleep(ANNOUNCED_WITHIN_S)
            self._panel.clear_below(ANNOUNCED_LINES)
            self._panel.note(STOPPING)


@contextlib.contextmanager
def _logged_above() -> Iterator[None]:
    """Have handlers of logs that write to this terminal write above the panel."""
    streams = (sys.stdout, sys.stderr)
    proxies = {each.rich_proxied_file: each for each in streams if hasattr(each, "rich_proxied_file")}
    loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {
        each for logger in loggers for each in logger.handlers if getattr(each, "stream", None) in proxies
    }
    before = {each: each.setStream(proxies[each.stream]) for each in handlers}  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for handler, stream in before.items():
            handler.setStream(stream)  # type: ignore[attr-defined]
