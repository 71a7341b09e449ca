"""What a script's process is given before the script runs, and what is taken back after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from determined import _info, core
from determined.core import _context

from determined_ds.config.layout import Accelerator
from determined_ds.protocol.handed_on import REPORT
from determined_ds.runtime.scripts.cluster_info import give_cluster_info
from determined_ds.runtime.scripts.core_init import core_init
from determined_ds.runtime.scripts.given_run import ScriptRun
from determined_ds.runtime.scripts.meeting import meet_by_files
from determined_ds.runtime.upstream import load_deepspeed


@contextlib.contextmanager
def surrounded(run: ScriptRun, accelerator: Accelerator) -> Iterator[None]:
    """In here a process is a rank of a run, as far as a script can see.

    Args:
        run: The run.
        accelerator: What it computes on.
    """
    load_deepspeed(accelerator.name)
    meet_by_files()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_info, "_info", _info._info))
        give_cluster_info(run)
        for module in (core, _context):
            stack.enter_context(mock.patch.object(module, "init", core_init))
        if REPORT in os.environ and os.environ.get("RANK", "0") == "0":
            from determined_ds.runtime.master.unmanaged import reported

            run.report = stack.enter_context(reported(run.run_dir, run.experiment.config, run.hparams))
        yield
