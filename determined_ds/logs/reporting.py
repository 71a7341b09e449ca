"""What a training reports to its core context, sent to the tools of ``hyperparameters.logging`` too.

Trials, sessions, Hugging Face trainers and Core API scripts all report there, on a cluster and off it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import TOOLS, read_loggers
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.experiment.decide import Task
from determined_ds.logs.clients import MOST_METRICS, Client, load_client
from determined_ds.logs.shown_run import COMPLETED, FAILED, STOPPED, NumbersAt, named, shown_run
from determined_ds.logs.tensorboard import OF_TOOLS, copy_changed, upload_too
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.records import RESTART, START, Launch, decided_fields, launch_of, read_launches
from determined_ds.rundir.run_dir import RunDir

logger = logging.getLogger("determined_ds")

# Reports that wait for a tool; more than a day of one a minute, or of an hour of two a second.
MOST_WAITING = 10_000
EVERY_S = 1.0  # between two deliveries: a tool takes several reports more cheaply than each of them
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0  # between tries, where a tool fails
LAST_TRIES = 3  # of a tool that fails, once the run has ended
# How long the end of a run waits for its tools; that of one that failed, for which other ranks wait, is short.
LAST_S, LAST_OF_FAILED_S = 30.0, 4.0


class Delivery(threading.Thread):
    """Delivers to one tool: what it fails to take is offered again, what is lost is counted.

    Args:
        name: Of the tool.
        client: Its run.
    """

    def __init__(self, name: str, client: Client) -> None:
        super().__init__(name=name, daemon=True)
        self._client = client
        self._waiting: deque[NumbersAt] = deque()
        self._num_lost = 0
        self._ending = threading.Event()
        self._status = ""
        self._has_warned = False
        self._is_closed = False
        self.start()

    def put(self, report: NumbersAt) -> None:
        """Offer a report; it is lost where too many wait."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(report)
        else:
            self._num_lost += 1

    def finish(self, status: str) -> None:
        """Have the tool take what waits, and close the run."""
        self._status = status
        self._ending.set()

    def close(self, until: float) -> None:
        """Wait until the tool has closed the run, at most until this moment of :func:`time.monotonic`."""
        self.join(max(0.0, until - time.monotonic()))
        unsent = self._num_lost + len(self._waiting)
        if unsent:
            self._warn(f"has not taken {count(unsent, 'report')} of metrics")
        elif not self._is_closed:
            self._warn("has not closed the run")

    def _warn(self, text: str) -> None:
        logger.warning("warning: %s %s\n  fix: %s", TOOLS[self.name].title, text, TOOLS[self.name].fix)

    # ------------------------------------------------------------------------------------ in the thread

    def run(self) -> None:
        """Deliver until the run has ended."""
        if not self._tried(self._begin):
            return
        while not self._ending.wait(EVERY_S) or self._waiting:
            if not self._tried(lambda: self._client.send(self._waiting)):
                return
        self._is_closed = self._tried(lambda: self._client.end(self._status))

    def _begin(self) -> None:
        if where := self._client.begin():
            print(f"{self.name}: {where}", flush=True)

    def _tried(self, step: Callable[[], None]) -> bool:
        """Try a step until it succeeds; False where it still fails after the end of the run."""
        wait_s, tries = FIRST_WAIT_S, LAST_TRIES
        while tries:
            tries -= self._ending.is_set()
            try:
                step()
                return True
            except Exception as error:
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                if not self._has_warned:
                    self._has_warned = True
                    self._warn(f"does not take the run, which continues: {reason}; it is tried again")
            if self._ending.wait(wait_s):
                time.sleep(FIRST_WAIT_S)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
        return False


@contextlib.contextmanager
def reported_to_tools(
    core_context: Any,
    task: Task,
    accelerator: Accelerator,
    *,
    run_dir: RunDir | None = None,
    info: Any = None,
    resolved: Callable[[], ResolvedConfig | None] = lambda: None,
) -> Iterator[None]:
    """Within, what is reported to a core context goes to the tools of ``hyperparameters.logging`` too.

    A tool's run begins with the first report: a run that resumes has loaded its checkpoint by then.

    Args:
        core_context: Of this rank; only rank 0 sends.
        task: What is trained.
        accelerator: What the ranks compute on.
        run_dir: Of a run off a cluster.
        info: Determined's information about the trial, on a cluster.
        resolved: Says what was decided, once training begins; None where the code has decided it.
    """
    tools = read_loggers(task.hyperparameters, [])
    if core_context.distributed.rank != 0 or not tools:
        yield
        return
    kinds = {}
    for name in tools:
        try:
            kinds[name] = load_client(name)
        except Exception as error:  # what is only shown fails no training
            what = f"{TOOLS[name].title} gets no reports: its client cannot be loaded: {error}"
            logger.warning("warning: %s\n  fix: pip install %s", what, TOOLS[name].package)
    if run_dir is not None:
        folder = run_dir.path
    else:
        folder = Path(tempfile.mkdtemp())
        upload_too(core_context.train, folder)

    deliveries: list[Delivery] = []
    beginning, is_stopping = threading.Lock(), threading.Event()
    has_begun = threading.Event()
    nested = threading.local()  # one report may be made by another, e.g. by that of any group

    def send(group: str, steps_completed: int, metrics: Mapping[str, Any], *_: Any, **more: Any) -> None:
        with beginning:
            if not has_begun.is_set():
                launch = _launch(task, accelerator, run_dir, info, resolved(), core_context.distributed.size)
                about = shown_run(launch, task.exp_conf or {}, folder, info)
                deliveries.extend(Delivery(name, kinds[name](about, tools[name])) for name in kinds)
                has_begun.set()
        numbers, now = named(group, metrics), round(time.time(), 3)
        while some := dict(islice(numbers, MOST_METRICS)):
            for delivery in deliveries:
                delivery.put(NumbersAt(int(steps_completed), now, some))

    def sending(report: Callable[..., Any], *group: Any) -> Callable[..., Any]:
        @functools.wraps(report)
        def reporting(*given: Any, **options: Any) -> Any:
            is_outer, nested.inside = not getattr(nested, "inside", False), True
            try:
                result = report(*given, **options)
            finally:
                nested.inside = not is_outer
            if is_outer:
                send(*(*group, *given), **options)
            return result

        return reporting

    train, preempt = core_context.train, core_context.preempt
    for group in ("training", "validation"):
        setattr(train, f"report_{group}_metrics", sending(getattr(train, f"report_{group}_metrics"), group))
    train.report_metrics = sending(train.report_metrics)
    should_preempt = preempt.should_preempt

    @functools.wraps(should_preempt)
    def watching(*given: Any, **options: Any) -> bool:
        answer = bool(should_preempt(*given, **options))
        if answer:
            is_stopping.set()
        return answer

    preempt.should_preempt = watching

    status = FAILED
    try:
        yield
        status = STOPPED if is_stopping.is_set() else COMPLETED
    except SystemExit as error:
        if not error.code:
            status = STOPPED if is_stopping.is_set() else COMPLETED
        raise
    finally:
        until = time.monotonic() + (LAST_OF_FAILED_S if status == FAILED else LAST_S)
        with HEART.patiently():
            for delivery in deliveries:
                delivery.finish(status)
            for delivery in deliveries:
                delivery.close(until)
        if run_dir is None:  # a context that uploads by itself does so when it is closed
            copy_changed(folder, Path(core_context.train.get_tensorboard_path()) / OF_TOOLS)


def _launch(
    task: Task,
    accelerator: Accelerator,
    run_dir: RunDir | None,
    info: Any,
    decided: ResolvedConfig | None,
    size: int,
) -> Launch:
    """What the launcher has written of this start of the ranks; on a cluster this writes it."""
    written = read_launches(run_dir.current(run_dir.launches)) if run_dir is not None else ()
    if written:
        by_code = not written[-1].strategy and decided is not None  # known by now
        return replace(written[-1], **decided_fields(decided)) if by_code and decided else written[-1]
    config = task.exp_conf or {}
    is_again = info is not None and task.on_cluster and info.trial._trial_run_id > 1
    return launch_of(
        name=str(config.get("name") or ""),
        runs=str(config.get("entrypoint") or ""),
        hyperparameters=task.hyperparameters.data,
        resolved=decided,
        accelerator=accelerator,
        slots=size,
        trial_seed=task.seed,
        kind=RESTART if is_again else START,
        steps_completed=task.steps_completed if is_again else 0,
    )
