"""A run of another process is followed by its files: until it ends, through a resume, and afterwards."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from determined_ds.cli.main import main
from determined_ds.errors import ConfigError
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.recorded_run import read_run
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.run_lock import RunLock
from determined_ds.report.terminal import watching
from determined_ds.report.terminal.watching import FollowedRun, follow

EXPERIMENT = """
name: followed
searcher: {name: single, metric: validation_loss}
hyperparameters: {fit: {max_length: {batches: 40}}}
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    there = RunDir(tmp_path / "run")
    there.path.mkdir()
    there.experiment.write_text(EXPERIMENT)
    report(there, "training", 10, loss=4.0)
    return there


@pytest.fixture
def held(there: RunDir) -> Iterator[RunLock]:
    """The run has a writer: this process."""
    with RunLock(there.path) as lock:
        yield lock


def report(there: RunDir, group: str, batch: int, **metrics: Any) -> None:
    append_record(
        there.metrics,
        {"group": group, "steps_completed": batch, "metrics": metrics, "time": time.time()},
    )


def checkpoint(there: RunDir, batch: int) -> None:
    folder = there.checkpoints / f"uuid-{batch}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"steps_completed": batch}))


def test_a_run_that_has_ended_is_shown_once(there: RunDir) -> None:
    report(there, "validation", 40, validation_loss=2.5)
    done = CliRunner().invoke(main, ["watch", str(there.path)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[1:4] == [
        "training    batch 10/40  loss 4",
        "validation  batch 40/40  validation_loss 2.5",
        "followed: ended, 40 of 40 batches",
    ]


def test_one_that_trains_is_followed_to_its_end(there: RunDir, held: RunLock) -> None:
    output = io.StringIO()
    watched = threading.Thread(target=follow, args=(there.path, Console(file=output, width=80)))
    watched.start()
    report(there, "training", 20, loss=3.0)
    until(lambda: "batch 20/40" in output.getvalue())
    assert watched.is_alive()
    report(there, "training", 30, loss=2.0)
    held.release()
    watched.join(10)
    assert not watched.is_alive()
    assert "batch 30/40" in output.getvalue()
    assert "followed: ended, 30 of 40 batches" in output.getvalue()


def test_what_it_shows_is_what_the_files_say(there: RunDir, held: RunLock) -> None:
    followed = FollowedRun(read_run(there.path))
    followed.look()
    report(there, "validation", 10, validation_loss=2.5)
    report(there, "training", 20, loss=3.0)
    checkpoint(there, 10)
    followed.look()
    state = followed.state
    assert (state.batch, state.total, state.loss, state.checkpoint) == (20, 40, 3.0, 10)
    assert state.best is not None
    assert state.best.value == 2.5


def test_a_run_that_goes_back_to_a_checkpoint_is_read_anew(there: RunDir, held: RunLock) -> None:
    """As a resume does, which replaces the file."""
    report(there, "training", 20, loss=3.0)
    followed = FollowedRun(read_run(there.path))
    followed.look()
    kept = there.metrics.read_text().splitlines(keepends=True)[0]
    (there.path / "new").write_text(kept)
    (there.path / "new").replace(there.metrics)
    report(there, "training", 12, loss=3.5)
    followed.look()
    assert (followed.state.batch, followed.state.loss) == (12, 3.5)
    assert followed.state.losses.values == [4.0, 3.5]


def test_on_a_terminal_the_panel_is_drawn_and_removed(there: RunDir, held: RunLock) -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    watched = threading.Thread(target=follow, args=(there.path, console))
    watched.start()
    until(lambda: "training    batch 10/40" in output.getvalue())
    held.release()
    watched.join(10)
    assert not watched.is_alive()
    assert "ended       batch 10/40  25 %" in output.getvalue()
    assert output.getvalue().rstrip().endswith("--open")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        follow(tmp_path, Console(file=io.StringIO()))
    done = CliRunner().invoke(main, ["watch", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "does not exist" in done.output


def until(happens: Any) -> None:
    deadline = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)
