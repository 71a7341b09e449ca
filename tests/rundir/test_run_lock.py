"""A run directory has one writer, which is named to the second one, and is private to its user."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.harness.command import TIMEOUT_S, Started, det_ds
from tests.package import records
from tests.rundir.runs import until, words

COMMANDS = {"run": [], "search": [], "compare": ["--strategies", "zero1"], "autotune": ["--budget", "2"]}


def reported(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").is_file() and bool(records(run_dir, "training"))


def test_a_second_writer_is_refused_with_the_process_id_of_the_first(tmp_path: Path) -> None:
    """Also search, compare and autotune; and once the first is killed, its run can be trained further."""
    run_dir = tmp_path / "shared/runs/tiny/run"
    (tmp_path / "shared").mkdir(mode=0o755)
    started = Started(*words(tmp_path / "trial", run_dir))
    try:
        until(lambda: reported(run_dir) or started.poll() is not None)
        assert started.poll() is None, started.communicate()
        given = [str(run_dir / "experiment.yaml"), str(tmp_path / "trial"), "--run-dir", str(run_dir)]
        for command, more in COMMANDS.items():
            done: Result = CliRunner().invoke(main, [command, *given, "--accelerator", "cpu", *more])
            assert done.exit_code == 2, (command, done.output)
            assert f"process {started.pid} is writing to it" in done.output, command
    finally:
        os.kill(started.pid, signal.SIGKILL)
        started.wait(TIMEOUT_S)
        started.close()
    folders = [run_dir, *run_dir.parents[:2]]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755, "a folder that exists stays as it was"
    done_again = det_ds(*words(tmp_path / "trial", run_dir, fit={"max_length": {"batches": 2}}), "--resume")
    assert done_again.returncode == 0, done_again.stderr
