"""What a training reports to its core context, sent to the tools of ``hyperparameters.logging`` too.

Trials, sessions, Hugging Face trainers and Core API scripts all report there, on a cluster and off it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import LOGGING, TOOLS, read_loggers
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.files import write_whole
from determined_ds.logs.clients import (
    COMPLETED,
    FAILED,
    MOST_METRICS,
    STOPPED,
    Client,
    NumbersAt,
    ShownRun,
    client_kind,
)
from determined_ds.logs.tensorboard import OF_TOOLS
from determined_ds.rundir.records import FORK, RESTART, START, decided_fields, launch_of, read_launches
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import HEART

if TYPE_CHECKING:
    from determined_ds.train.rank import Here

logger = logging.getLogger("determined_ds")

MOST_WAITING = 10_000  # reports that wait for a tool: more than a day of one a minute
EVERY_S, LONGEST_WAIT_S = 1.0, 30.0  # between two deliveries, which take several reports; where a tool fails
LAST_TRIES = 3  # of a tool that fails, once the run has ended
# How long the end of a run waits for its tools; that of one that failed, for which other ranks wait, is short.
LAST_S, LAST_OF_FAILED_S = 30.0, 4.0
UNCATEGORIZED = "Uncategorized"  # a master's project of experiments without one
# Fields of a launch that have a place of their own in the configuration that tools show.
APART = ("hyperparameters", "ds_config", "origins", "versions", "machine", "warnings", "time")


class Delivery(threading.Thread):
    """Hands reports to a tool's client: what it fails to take is offered again, and what is lost is counted.

    Of what waits while the tool takes nothing, the latest is lost where too much does.
    """

    def __init__(self, name: str, client: Client) -> None:
        super().__init__(name=f"logging to {name}", daemon=True)
        self._tool, self._client = name, client
        self._waiting: deque[NumbersAt] = deque()
        self._num_lost, self._is_closed = 0, False
        self._ending, self._status = threading.Event(), ""
        self.start()

    def put(self, report: NumbersAt) -> None:
        """Offer a report."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(report)
        else:
            self._num_lost += 1

    def end(self, status: str) -> None:
        """Have the tool take what waits and close the run; does not wait for it."""
        self._status = status
        self._ending.set()

    def wait(self, until_s: float) -> None:
        """Wait for it until then, by the monotonic clock."""
        self.join(max(0.0, until_s - time.monotonic()))
        if unsent := self._num_lost + len(self._waiting):
            self._warn(f"has not taken {unsent} report{'s' * (unsent > 1)} of metrics")
        elif not self._is_closed:
            self._warn("has not closed the run")

    def run(self) -> None:
        """In the thread: deliver until the run has ended."""
        is_open, has_warned, tries, pause_s = False, False, LAST_TRIES, EVERY_S
        while tries:
            is_ending = self._ending.wait(pause_s)
            try:
                if not is_open and (where := self._client.begin()):
                    print(f"{self._tool}: {where}", flush=True)
                is_open = True
                self._client.send(self._waiting)
                if is_ending:
                    self._client.end(self._status)
                    self._is_closed = True
                    return
                pause_s = EVERY_S
            except Exception as error:
                if not has_warned:
                    has_warned = True
                    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                    self._warn(f"does not take the run, which continues: {reason}; it is tried again")
                if is_ending:
                    tries -= 1
                    time.sleep(EVERY_S)
                pause_s = min(LONGEST_WAIT_S, 2 * pause_s)

    def _warn(self, text: str) -> None:
        tool = TOOLS[self._tool]
        logger.warning("warning: %s %s\n  fix: %s", tool.title, text, tool.fix)


@contextlib.contextmanager
def reported_to_tools(
    core_context: Any,
    trained: Here,
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
        trained: The trial.
        accelerator: What the ranks compute on.
        run_dir: Of a run off a cluster.
        info: Determined's information about the trial, on a cluster.
        resolved: Says what was decided, once training begins; None where the code has decided it.
    """
    options, kinds = read_loggers(trained.hyperparameters), {}
    for name in options if core_context.distributed.rank == 0 else ():
        try:
            kinds[name] = client_kind(name)
        except Exception as error:  # what is only shown fails no training
            what = f"{TOOLS[name].title} gets no reports: its client cannot be loaded: {error}"
            logger.warning("warning: %s\n  fix: pip install %s", what, TOOLS[name].package)
    if not kinds:
        yield
        return
    # Clients make and remove files at any time, and Determined's upload fails where a file vanishes: so not there.
    folder = run_dir.path if run_dir is not None else Path(tempfile.mkdtemp())
    deliveries: list[Delivery] = []
    beginning, is_stopping = threading.Lock(), threading.Event()
    train, preempt = core_context.train, core_context.preempt
    # All reports of a context pass through one of its methods.
    report, should_preempt = train._report_trial_metrics, preempt.should_preempt

    @functools.wraps(report)
    def reporting(group: str, steps_completed: int, metrics: Mapping[str, Any], *more: Any) -> None:
        report(group, steps_completed, metrics, *more)
        with beginning:  # reports of several threads may overlap
            if not deliveries:
                about = shown_run(
                    trained, accelerator, folder, core_context.distributed.size, info, resolved()
                )
                deliveries.extend(Delivery(name, kind(about, options[name])) for name, kind in kinds.items())
        numbers, now = named(group, metrics), round(time.time(), 3)
        while some := dict(islice(numbers, MOST_METRICS)):
            for delivery in deliveries:
                delivery.put(NumbersAt(int(steps_completed), now, some))

    @functools.wraps(should_preempt)
    def watching(*given: Any, **options: Any) -> bool:
        answer = bool(should_preempt(*given, **options))
        if answer:
            is_stopping.set()
        return answer

    train._report_trial_metrics = reporting
    preempt.should_preempt = watching
    has_failed = True
    try:
        yield
        has_failed = False
    except SystemExit as error:
        has_failed = bool(error.code)
        raise
    finally:
        status = FAILED if has_failed else STOPPED if is_stopping.is_set() else COMPLETED
        until_s = time.monotonic() + (LAST_OF_FAILED_S if has_failed else LAST_S)
        with HEART.patiently():
            for delivery in deliveries:
                delivery.end(status)
            for delivery in deliveries:
                delivery.wait(until_s)
        if run_dir is None:  # what is offline is uploaded with the files for TensorBoard
            with contextlib.suppress(OSError, shutil.Error):
                target = Path(train.get_tensorboard_path()) / OF_TOOLS
                # Their times are new ones: what is older than the last upload is not uploaded.
                shutil.copytree(folder, target, dirs_exist_ok=True, copy_function=shutil.copyfile)


def shown_run(
    trained: Here,
    accelerator: Accelerator,
    folder: Path,
    num_ranks: int,
    info: Any,
    decided: ResolvedConfig | None,
) -> ShownRun:
    """Describe a run to the tools; off a cluster, its key is kept in the run directory ``folder``."""
    exp_conf, run_dir = trained.exp_conf or {}, RunDir(folder)
    if written := read_launches(run_dir.current(run_dir.launches)) if info is None else ():
        launch = written[-1]
        if not launch.strategy and decided is not None:  # the code has decided it by now
            launch = replace(launch, **decided_fields(decided))
    else:
        is_again = info is not None and trained.on_cluster and info.trial._trial_run_id > 1
        launch = launch_of(
            name=str(exp_conf.get("name") or ""),
            runs=str(exp_conf.get("entrypoint") or ""),
            hyperparameters=trained.hyperparameters.data,
            resolved=decided,
            accelerator=accelerator,
            slots=num_ranks,
            trial_seed=trained.seed,
            kind=RESTART if is_again else START,
            steps_completed=trained.steps_completed if is_again else 0,
        )
    key, ids = "", {"run_dir": str(folder)}
    if info is not None:
        trial = info.trial
        key = hashlib.sha256(f"{info.cluster_id}/{trial.trial_id}".encode()).hexdigest()[:32]
        own_name, group = f"trial {trial.trial_id}", f"experiment {trial.experiment_id}"
        ids = {"cluster_id": info.cluster_id, "experiment_id": trial.experiment_id, "master": info.master_url}
        ids["trial_id"] = trial.trial_id
    else:
        own_name = folder.name
        group = folder.parent.parent.name if folder.parent.name == "trials" else ""  # of det-ds search
        if launch.kind not in (START, FORK):
            with contextlib.suppress(OSError, ValueError, KeyError):
                key = str(json.loads(run_dir.loggers.read_bytes())["key"])
        if not key:
            key = uuid.uuid4().hex
            write_whole(run_dir.loggers, json.dumps({"key": key}) + "\n")
    name, project, given = launch.name or "determined_ds", exp_conf.get("project"), asdict(launch)
    return ShownRun(
        key=key,
        name=f"{name} {own_name}",
        project=str(project if project and project != UNCATEGORIZED else name),
        group=f"{name} {group}" if group else "",
        tags=tuple(map(str, exp_conf.get("labels") or ())),
        notes=str(exp_conf.get("description") or ""),
        config={
            **{field: value for field, value in given.items() if field not in APART and value != ""},
            **{field: given[field] for field in ("origins", "versions", "machine")},
            "hyperparameters": {each: v for each, v in launch.hyperparameters.items() if each != LOGGING},
            "deepspeed": given["ds_config"],
            "determined": ids,
        },
        folder=folder,
    )


def named(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Metrics by the names that they have in every tool, e.g. ``validation/accuracy/top5``; only numbers."""
    if hasattr(value, "tolist"):  # of torch or numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named(f"{name}/{index}", item)
    elif isinstance(value, (bool, int, float)):
        yield name, int(value) if isinstance(value, bool) else value
