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
from typing import Any

import torch

from determined_ds.logs.tensorboard import upload, write_scalars
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.report.live import TRAINING, VALIDATION, DrawnPanel, RunState, report_line
from determined_ds.rundir.signals import HEART, STOP
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.trial.instruction_times import pipeline_times

DRAWN_EVERY_S = 0.25


class Reporter:
    """Makes reports of the accumulated metrics, sends them as the chief, and shows them.

    With a panel, notes and validations are lines above it; without, each report is a line.

    Args:
        shows: Whether this rank shows anything, with a panel if it has a terminal.
    """

    def __init__(self, trial: Any, context: Any, *, shows: bool) -> None:
        self._context, self._shows = context, shows
        self.tokens_per_sample: int | None = getattr(trial, "tokens_per_sample", lambda: None)()
        self._training_s, self._num_batches = 0.0, 0  # since the last report
        self._started: float | None = None
        self.latest: dict[str, Any] = {}
        self.memory_by_rank: tuple[int, ...] = ()
        terminal = os.environ.get("TERM", "").lower() if sys.stdout.isatty() else ""
        self._panel = DrawnPanel() if shows and terminal not in ("", "dumb", "unknown") else None
        self._state, self._next_s, self._status = RunState(), 0.0, ""
        self._handlers = contextlib.ExitStack()

    def batch_begins(self) -> None:
        """A batch is about to be trained: from the first one on, the time until :meth:`pause` is that of training.

        Batches are not timed one by one, since a GPU works on after the call that started its work. How long it took
        is known where the host waits for it, at a report or a pause.
        """
        self._started = time.perf_counter() if self._started is None else self._started
        self._num_batches += 1

    def take_back_batch(self) -> int:
        """The batch that has begun is not trained. Returns those that were, since the last report."""
        self._num_batches = max(0, self._num_batches - 1)
        return self._num_batches

    def pause(self) -> None:
        """What follows is not training: a report, a validation, a checkpoint."""
        if self._started is not None:
            if self._context.device.type == "cuda":
                torch.cuda.synchronize(self._context.device)
            self._training_s += time.perf_counter() - self._started
            self._started = None

    def reduce(self, sums: MetricSums, *riders: torch.Tensor) -> tuple[dict[str, Any], list[list[float]]]:
        """The training metrics since the last report over all ranks, by one collective; and its other riders."""
        context = self._context
        engine, times = context.models[0], pipeline_times(context.models)
        own = [peak_bytes(context.device), *(times.take() if times else ())]
        reduced, rows = sums.reduce(torch.tensor(own, dtype=torch.float64), *riders)
        self.pause()
        peaks, *columns = list(zip(*rows, strict=True))[: len(own)]
        self.memory_by_rank = tuple(map(int, peaks))
        metrics: dict[str, Any] = {**reduced, **context.reduce_metrics(for_training=True)}
        if rates := engine.get_lr() if engine.optimizer is not None else []:
            metrics["lr"] = float(rates[0])
        norm = engine.get_global_grad_norm()
        if norm is not None and math.isfinite(
            norm
        ):  # inf where the step was skipped: no gradient was applied
            metrics["grad_norm"] = float(norm)
        if engine.fp16_enabled():
            # Optimizers without ZeRO keep it elsewhere than those with; this works for all of them.
            metrics["loss_scale"] = float(engine._get_optimizer_loss_scale())
        if engine.fp16_enabled() or engine.skipped_steps:
            metrics["skipped_steps"] = int(engine.skipped_steps)
        # Over replicas: samples are counted once, however many ranks hold a replica.
        seconds, samples = self._training_s, self._num_batches * context.resolved.batch.global_batch_size
        self._training_s, self._num_batches = 0.0, 0
        if seconds:
            metrics["samples_per_second"] = samples / seconds
            if self.tokens_per_sample:
                metrics["tokens_per_second"] = samples / seconds * self.tokens_per_sample
        metrics |= memory_metrics(self.memory_by_rank)
        if times is not None and (measured := times.bubble(*columns)) is not None:
            metrics |= {"bubble": measured, "bubble_ideal": counted_bubble(times.pipeline)}
        self.latest = metrics
        return metrics, [row[len(own) :] for row in rows]

    def training(self, batches_trained: int, metrics: dict[str, Any], *, progress: float) -> None:
        """Send a report of training metrics."""
        if self._context.distributed.rank == 0:
            train = self._context._core.train
            with HEART.patiently():  # a master may not answer for a while
                train.report_training_metrics(steps_completed=batches_trained, metrics=metrics)
                train.report_progress(progress)
            self._show(TRAINING, batches_trained, metrics)

    def validation(self, batches_trained: int, metrics: dict[str, Any]) -> float | None:
        """Send a report of validation metrics, as the chief. Returns the best value before."""
        train = self._context._core.train
        best_before = train.get_experiment_best_validation()
        train.report_validation_metrics(steps_completed=batches_trained, metrics=metrics)
        self._show(VALIDATION, batches_trained, metrics)
        return None if best_before is None else float(best_before)

    def _show(self, group: str, batches_trained: int, metrics: dict[str, Any]) -> None:
        if self._context.get_enable_tensorboard_logging():
            write_scalars(self._context.get_tensorboard_writer(), group, batches_trained, metrics)
        self._state.take(group, batches_trained, metrics)
        self._draw()
        if self._panel is None or group != TRAINING:
            total = self._state.total
            self.note(report_line(group, batches_trained, total, metrics, digits=len(str(total or 0))))

    def upload(self) -> None:
        """Flush the files for TensorBoard; on a cluster, upload them to its storage."""
        if self._context.get_enable_tensorboard_logging():
            upload(self._context)

    # ------------------------------------------------------------------------------------ the terminal

    def start(self, state: RunState) -> None:
        """Training begins, or goes on, in this state."""
        self._state, done, total = state, state.batch, state.total
        if done and total is not None and done >= total:
            self.note(f"resumed at batch {done}; nothing left to train: max_length is {total}")
        elif done:
            self.note(f"resumed at batch {done}{'' if total is None else f' of {total}'}")
        if self._panel is None:
            return
        state.checkpoint, self._panel.state = done or None, state
        self._panel.start()
        # rich has put proxies in the place of these streams; handlers of logs still write to what was there before.
        proxies = {getattr(each, "rich_proxied_file", None): each for each in (sys.stdout, sys.stderr)}
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                if (stream := getattr(handler, "stream", None)) and stream in proxies:
                    self._handlers.callback(handler.setStream, handler.setStream(proxies[stream]))

    def step(self, batches_trained: int) -> None:
        """A batch was trained."""
        if self._panel is not None and (now := time.monotonic()) >= self._next_s:
            self._state.at(batches_trained, now)
            self._draw()

    def status(self, status: str) -> None:
        """What is done now: ``training``, ``validating`` or ``checkpointing``; a master is told by the chief."""
        if self._context.distributed.rank == 0 and status != self._status:
            self._status = self._state.status = status
            self._draw(at_once=True)
            with HEART.patiently():  # a master may not answer for a while
                self._context._core.train.set_status(status)

    def checkpoints(self, newest: int, writing: int | None) -> None:
        """The batch of the newest checkpoint, and again that of one which is still written while training continues."""
        state = self._state
        if writing is None and newest != state.checkpoint:
            state.checkpoint, state.checkpoint_time = newest, time.time()
        state.writing = writing
        self._draw()

    def note(self, text: str) -> None:
        """Show a line that is worth keeping."""
        if self._panel is not None:
            self._panel.note(text)
        elif self._shows:
            print(text, flush=True)

    def stop(self) -> None:
        """Training is over, successful or not."""
        if self._panel is not None:
            self._handlers.close()
            self._panel.stop()

    def _draw(self, *, at_once: bool = False) -> None:
        if self._panel is None or not self._panel.is_shown:
            return
        if STOP.is_set():
            # The launcher has announced it below the panel, which goes and takes those words along.
            self.stop()
            self._panel = None
            self.note("stopping    after this batch, with a checkpoint")
        elif at_once or time.monotonic() >= self._next_s:
            self._panel.refresh()
            self._next_s = time.monotonic() + DRAWN_EVERY_S
