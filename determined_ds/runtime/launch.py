"""N local ranks, by torch's own launcher."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED

GRACE_S = 10


def launch(
    trial: str,
    *,
    num_ranks: int,
    accelerator: Accelerator,
    context_dir: Path,
    run_dir: Path,
    arguments: list[str],
) -> int:
    """Start the ranks of a trial on this machine, and wait for them.

    Rank 0 writes to this terminal, the others to ``run_dir/logs``. When one dies, the others are ended.

    Args:
        trial: ``MODULE:CLASS``.
        num_ranks: Ranks to start.
        accelerator: What they compute on.
        context_dir: Their working directory.
        run_dir: The run directory.
        arguments: More arguments of ``determined_ds.train``.

    Returns:
        The exit code: 0, 2 for a configuration that cannot run, 1 where training failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _prepare_environment(num_ranks, accelerator, context_dir)
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
        logs_specs=DefaultLogsSpecs(
            log_dir=str(run_dir / "logs"),
            redirects={rank: Std.ALL for rank in range(1, num_ranks)} or Std.NONE,
        ),
    )
    command = ["-m", "determined_ds.train", trial, "--run-dir", str(run_dir)]
    command += ["--accelerator", accelerator.name, *arguments]
    os.chdir(context_dir)
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return _report_failure(error, run_dir)
    except SignalException as error:
        print(f"\nstopped by {error.sigval.name}; go on with --resume --run-dir {run_dir}", file=sys.stderr)
        return 128 + error.sigval
    return 0


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
    rank, first = error.get_first_failure()
    data = first.error_file_data or {}
    message = data.get("message")
    if isinstance(message, dict):
        text, extra = message["message"], message.get("extraInfo", {})
        code = int(extra.get("exit_code", EXIT_TRAINING_FAILED))
    else:
        text, code = f"rank {rank} ended without a word: {first.message}", EXIT_TRAINING_FAILED
    if code == EXIT_CONFIG:
        print(text, file=sys.stderr)
        return code
    print(f"\nrank {rank} failed first:\n\n{text.rstrip()}\n", file=sys.stderr)
    print(f"the output of the other ranks is in {run_dir / 'logs'}", file=sys.stderr)
    return EXIT_TRAINING_FAILED
