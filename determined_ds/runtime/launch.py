"""N local ranks, by torch's own launcher, and how they are stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from determined_ds.runtime.run_dir import CHECKPOINTS, LOGS

# Seconds that the ranks which are left have to end by themselves when one has died.
GRACE_S = 5
ASK_AGAIN_S = 0.5


def launch(
    trial: str,
    *,
    num_ranks: int,
    accelerator: Accelerator,
    context_dir: Path,
    run_dir: Path,
    arguments: list[str],
    resume_with: str,
) -> int:
    """Start the ranks of a trial on this machine, and wait for them.

    Rank 0 writes to this terminal, the others to ``run_dir/logs``. When one dies, the others are ended.
    The first SIGINT or SIGTERM asks the ranks to finish their batch and to checkpoint; the second ends them.

    Args:
        trial: ``MODULE:CLASS``.
        num_ranks: Ranks to start.
        accelerator: What they compute on.
        context_dir: Their working directory.
        run_dir: The run directory.
        arguments: More arguments of ``determined_ds.train``.
        resume_with: The command that goes on with the run, for the message after a stop.

    Returns:
        The exit code: 0, also when stopped at the user's request; 2 for a configuration that cannot run; 1 where
        training failed; 128 + the signal's number after a second one.
    """
    _prepare_environment(num_ranks, accelerator, context_dir)
    command = ["-m", "determined_ds.train", trial, "--run-dir", str(run_dir)]
    command += ["--accelerator", accelerator.name, *arguments]
    os.chdir(context_dir)
    stopping = _Stopping()
    error = _run_ranks(command, num_ranks, run_dir)
    if error is not None and not (stopping.signals and _only_signalled(error)):
        return _report_failure(error, run_dir)
    if not stopping.signals:
        return 0
    if any((run_dir / CHECKPOINTS).glob("[!.]*")):
        print(f"resume with: {resume_with}", file=sys.stderr)
    else:
        print("stopped before the first checkpoint: there is nothing to resume", file=sys.stderr)
    return 0 if len(stopping.signals) == 1 else 128 + stopping.signals[-1]


def _run_ranks(command: list[str], num_ranks: int, run_dir: Path) -> Any:
    """Run the ranks to their end by torch's launcher; its account of the failures, None where there are none."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Where a rank has died, torch waits for the others by this default, whatever its shutdown_timeout says.
    PContext.close.__defaults__ = (None, GRACE_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=GRACE_S,
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are ours
        logs_specs=DefaultLogsSpecs(
            log_dir=str(run_dir / LOGS),
            redirects=dict.fromkeys(range(1, num_ranks), Std.ALL) or Std.NONE,
        ),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return error
    return None


@dataclass
class _Stopping:
    """Handles SIGINT and SIGTERM of the launcher: the first asks the ranks to stop, the second ends them."""

    signals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        self.signals.append(number)
        if len(self.signals) > 1:
            _signal_ranks(signal.SIGKILL)
            return
        name = signal.Signals(number).name
        print(f"\n{name}: stopping after this batch, with a checkpoint; again stops at once", file=sys.stderr)
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def _keep_asking(self) -> None:
        """Ask again until all have ended: a rank may not have been started yet. Asking twice changes nothing."""
        while True:
            _signal_ranks(signal.SIGTERM if len(self.signals) == 1 else signal.SIGKILL)
            time.sleep(ASK_AGAIN_S)


def _signal_ranks(number: signal.Signals) -> None:
    for rank in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            rank.send_signal(number)


def _only_signalled(error: Any) -> bool:
    """Whether the ranks failed by our own signals alone: killed, or not yet far enough to handle one."""
    return all(failure.exitcode in (-signal.SIGKILL, -signal.SIGTERM) for failure in error.failures.values())


def _prepare_environment(num_ranks: int, accelerator: Accelerator, context_dir: Path) -> None:
    os.environ["DS_ACCELERATOR"] = accelerator.name
    paths = [str(context_dir), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Ranks that share the cores: as many threads each as there are cores for.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _report_failure(error: Any, run_dir: Path) -> int:
    """Show the first failure's own words, and say where the rest is."""
    rank, first = _first_failure(error)
    data = first.error_file_data or {}
    message = data.get("message")
    if isinstance(message, dict):
        text, extra = message["message"], message.get("extraInfo", {})
        code = int(extra.get("exit_code", EXIT_TRAINING_FAILED))
    else:
        text, code = f"it ended without a word: {first.message}", EXIT_TRAINING_FAILED
    if code == EXIT_CONFIG:
        for problem in re.split(r"\n(?=\S)", text.rstrip()):
            print(f"error: {problem}", file=sys.stderr)
        return code
    print(f"\nrank {rank} failed first:\n\n{text.rstrip()}\n", file=sys.stderr)
    logs = sorted((run_dir / LOGS).rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
    if logs:
        print(f"what the other ranks wrote is in {logs[-1].parent.parent}", file=sys.stderr)
    return EXIT_TRAINING_FAILED


def _first_failure(error: Any) -> tuple[int, Any]:
    """The failure that came first; a rank that the launcher ended because of another never did."""

    def place(item: tuple[int, Any]) -> tuple[bool, float]:
        _, failure = item
        message = (failure.error_file_data or {}).get("message")
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        ended_by_us = failure.exitcode == -signal.SIGTERM
        return ended_by_us, float(extra.get("precise_timestamp", failure.timestamp))

    found: tuple[int, Any] = min(error.failures.items(), key=place)
    return found
