"""A rank whose work is a script, off a cluster; on one the script runs by itself::

    python3 -m determined_ds.script --run-dir DIR -- train.py ARGUMENTS
    python3 -m determined_ds.script --run-dir DIR -- -m package.module ARGUMENTS

``det-ds run`` starts it. The script finds what a cluster would give it, e.g. ``det.get_cluster_info()``.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

from determined_ds.check.trial import without_library
from determined_ds.errors import ConfigError
from determined_ds.experiment.entrypoint import Entrypoint
from determined_ds.rundir.handed_on import LAUNCHED_BY
from determined_ds.rundir.records import relink
from determined_ds.rundir.signals import TRAINED
from determined_ds.train.rank import RankProcess, Run, begin, end_process, rank_parser


def main(argv: list[str] | None = None) -> int:
    """Run a script as one rank. Returns the exit code."""
    parser = rank_parser("determined_ds.script", "Run a script as one rank.")
    words = "FILE or -m MODULE, and its arguments, after --"
    parser.add_argument("script", metavar="SCRIPT", nargs="+", help=words)
    options = parser.parse_args(argv)
    script = Entrypoint(words=tuple(options.script), is_script=True)
    code = RankProcess(options.run_dir, script.name).run(lambda: _run(script, Run.of(options)))
    if code == 0 and LAUNCHED_BY in os.environ:  # this process ends without Python's own end
        atexit._run_exitfuncs()
    return code


def _run(script: Entrypoint, run: Run) -> None:
    from determined import common

    from determined_ds.devices import detect_accelerator
    from determined_ds.train.group.watch import leave_watch
    from determined_ds.train.local_core import as_on_cluster

    begin(run)
    accelerator = detect_accelerator(run.accelerator)
    if run.experiment.config.get("debug"):
        common.set_logger(True)
    with as_on_cluster(run, accelerator):
        try:  # as Python would: as __main__, its folder first on the path
            sys.argv = [*script.words[script.is_module :]]
            if script.is_module:
                sys.path[0] = os.getcwd()
                runpy.run_module(script.name, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(script.name).resolve().parent)
                runpy.run_path(script.name, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except BaseException:
            there = run.there  # as seen by rank 0: another launch may get further
            if there.is_replaced and there.metrics.is_file() and there.metrics.stat().st_size:
                TRAINED.set()
            raise
    leave_watch()  # where it has left its contexts by an exit
    if run.test and not run.trained:
        raise ConfigError(without_library(script, "--test"))
    if run.measurement is not None and not run.is_measured:
        raise ConfigError(without_library(script, "--measure"))
    if os.environ.get("RANK", "0") == "0" and run.there.adopt_next():
        relink(run.there)


if __name__ == "__main__":
    code = main()
    if code:
        end_process(code)
    sys.stdout.flush()  # what the script has left to do at exit is done
    sys.exit(0)
