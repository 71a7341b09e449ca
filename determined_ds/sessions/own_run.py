"""A script that no launcher of ours has started: ``python3 train.py``, ``torchrun train.py``. It makes its own run."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined import core

from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document, refusal
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import as_plain
from determined_ds.experiment.decide import OF_EXPERIMENTS
from determined_ds.experiment.secrets import restored
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.resume import SLOTS
from determined_ds.launch.run import LocalRun, as_constants
from determined_ds.rundir.handed_on import LAST, shortened
from determined_ds.rundir.run_dir import RunDir, RunLock, short
from determined_ds.rundir.signals import STOP
from determined_ds.train.group.process_group import as_chief, join_process_group
from determined_ds.train.rank import Run, begin, ending_of, show_own_errors

# In the environment: the run directory to resume from, as ``session(config, run_dir=DIR, resume=True)`` says it.
RESUME = "DETERMINED_DS_RESUME"


@contextlib.contextmanager
def own_run(
    config: Any, run_dir: Any, resume: bool, accelerator: str | None, stopped: Callable[[], bool]
) -> Iterator[core.DistributedContext]:
    """Within, this process is a rank of a run, as under ``det-ds run``; it yields the ranks.

    The arguments are those of ``session``; ``stopped`` says whether training has stopped as requested, once it ended.
    """
    show_own_errors()
    devices = detect_accelerator(accelerator)
    ranks = join_process_group(devices)
    run = as_chief(ranks, lambda: _decided(config, run_dir and Path(run_dir), resume, ranks, devices.name))
    script = Run(run_dir=run.run_dir, experiment=run.experiment, accelerator=devices.name)
    if run.start.checkpoint is not None:
        script.resume = run.start.checkpoint.uuid
    elif run.start.fork is not None:
        script.fork = run.start.fork.path
    is_chief, code, cause, reason = ranks.rank == 0, 0, "", ""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, _frame: Any) -> None:
        STOP.set()
        signal.signal(number, before[signal.Signals(number)])
        if is_chief:
            print("stopping after this batch; a second signal stops at once", file=sys.stderr, flush=True)

    with RunLock(run.run_dir) if is_chief else contextlib.nullcontext():
        if is_chief:
            run.write()
        try:
            if is_chief:
                run.show()
            ranks.allgather(None)  # what ranks read is written
            for number in before:
                signal.signal(number, stop)
            begin(script)
            yield ranks
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                code, cause, reason, *_ = ending_of(error, run.run_dir)
            raise
        finally:
            begin(None)
            for number, handler in before.items():
                signal.signal(number, handler)
            STOP.clear()
            if is_chief:
                RunDir(run.run_dir).remove_next()
                run.end(code, cause, shortened(reason), stopped=stopped())


def _decided(
    config: Any, stated: Path | None, resume: bool, ranks: core.DistributedContext, accelerator: str
) -> LocalRun:
    """What runs, and where; as under every launcher, the first launch of a job may say that it resumes."""
    if isinstance(config, (str, os.PathLike)):
        document = restored(read_yaml(Path(config)), os.environ)
        if not OF_EXPERIMENTS & document.data.keys():
            fix = "give an experiment's YAML, or the hyperparameters as a mapping: session({...})"
            raise refusal(str(config), "is not an experiment: it has no hyperparameters", fix)
    else:
        given = as_plain(dict(config or {}))
        data = given if OF_EXPERIMENTS & given.keys() else {"hyperparameters": as_constants(given)}
        document = Document(name="session", data=data)
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py")
    for key, value in (("name", script.stem), ("entrypoint", ["python3", short(script)])):
        if document.get((key,)) is None:
            document = document.overwritten(((key,), value, "the script"))
    document = document.overwritten((SLOTS, ranks.size, "the launched ranks"))
    if resumed := os.environ.get(RESUME):
        stated, resume = Path(resumed), True
    elif stated is not None and RunDir(stated).is_empty():
        resume = False
    else:
        resume = resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    last = LAST if resume else None
    options = RunOptions(config=Path(document.name), accelerator=accelerator, run_dir=stated, resume=last)
    run = prepare_run(options, document=document, machines=ranks.cross_size)
    return replace(run, own_resume=f"{RESUME}={shlex.quote(short(run.run_dir))} {shlex.join(sys.orig_argv)}")
