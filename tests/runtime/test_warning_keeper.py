"""What a rank warns of is kept in a small file, and shown as before."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from determined_ds.protocol.kept_warnings import LONGEST, KeptWarning, append_warning, read_warnings
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime import warning_keeper
from determined_ds.runtime.warning_keeper import MOST_KINDS, OTHERS, WarningKeeper


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarningKeeper]:
    """One that has begun; loggers and warnings are as before afterwards."""
    monkeypatch.setattr(logging.Logger, "callHandlers", logging.Logger.callHandlers)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        keeper = WarningKeeper()
        keeper.begin(RunDir(tmp_path).logs, 1)
        yield keeper


def kept(tmp_path: Path) -> list[tuple[str, str, int]]:
    return [(each.level, each.message, each.count) for each in read_warnings(RunDir(tmp_path))]


def test_loggers_of_any_kind_and_python_warnings_are_kept(keeper: WarningKeeper, tmp_path: Path) -> None:
    apart = logging.getLogger("test_warning_keeper.apart")
    apart.propagate = False
    apart.warning("%d workers", 3)
    apart.info("not this")
    logging.getLogger("test_warning_keeper").error("lost", exc_info=OSError("no cable"))
    warnings.warn("slow", UserWarning, stacklevel=1)
    assert kept(tmp_path) == [
        ("WARNING", "3 workers", 1),
        ("ERROR", "lost (OSError: no cable)", 1),
        ("WARNING", "slow", 1),
    ]
    found = read_warnings(RunDir(tmp_path))
    assert found[2].source.startswith(f"UserWarning {__file__}:")
    assert all(each.ranks == (1,) for each in found)


def test_what_is_shown_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import logging, sys, warnings\n"
        "if len(sys.argv) > 1:\n"
        "    from pathlib import Path\n"
        "    from determined_ds.runtime.warning_keeper import KEEPER\n"
        "    KEEPER.begin(Path(sys.argv[1]), 0)\n"
        "warnings.warn('slow')\n"
        "logging.getLogger('a').warning('of no handler')\n"
        "logging.basicConfig(format='%(name)s %(message)s')\n"
        "logging.getLogger('a').warning('of a handler')\n"
        "logging.captureWarnings(True)\n"
        "warnings.warn('captured')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    shown = []
    for words in ("", f" {tmp_path / 'logs'}"):
        assert os.system(f"{sys.executable} {script}{words}") == 0
        shown.append(capfd.readouterr())
    assert shown[0] == shown[1]
    texts = [message.split("Warning: ")[-1].split("\n")[0] for _, message, _ in kept(tmp_path)]
    assert texts == ["slow", "of no handler", "of a handler", "captured"]


def test_what_a_filter_drops_is_not_kept(keeper: WarningKeeper, tmp_path: Path) -> None:
    logger = logging.getLogger("test_warning_keeper.filtered")
    logger.addFilter(lambda record: False)
    logger.warning("dropped")
    with warnings.catch_warnings(record=True):
        warnings.warn("caught", stacklevel=1)
    assert kept(tmp_path) == []


def test_warnings_that_differ_in_numbers_are_counted(keeper: WarningKeeper, tmp_path: Path) -> None:
    for batch in range(1000):
        keeper.keep(f"batch {batch} took {batch / 7} s", source="loop")
    assert (
        len((tmp_path / "logs" / "warnings-rank1.jsonl").read_text().splitlines()) == 10
    )  # 1, 2, 4, ... 512
    keeper.end()
    assert kept(tmp_path) == [("WARNING", "batch 0 took 0.0 s", 1000)]


def test_kinds_without_end_end(keeper: WarningKeeper, tmp_path: Path) -> None:
    for number in range(MOST_KINDS + 50):
        keeper.keep("x" * number, source="names")
    keeper.keep("y" * 10 * LONGEST, source="names")
    keeper.end()
    found = kept(tmp_path)
    assert len(found) == MOST_KINDS + 1
    assert found[-1] == ("WARNING", OTHERS, 51)


def test_ranks_and_launches_are_added_up(tmp_path: Path) -> None:
    logs = RunDir(tmp_path).logs
    for rank, time, count in ((0, 20.0, 1), (1, 10.0, 3), (0, 30.0, 2)):
        warning = KeptWarning(
            message=f"{count} lost", time=time, last_time=time, steps_completed=7, count=count
        )
        append_warning(logs, warning, rank)
    with (logs / "warnings-rank0.jsonl").open("a") as file:
        file.write('{"time": 3, "mess')
    (found,) = read_warnings(RunDir(tmp_path))
    assert (found.message, found.count, found.ranks) == ("3 lost", 6, (0, 1))
    assert (found.time, found.last_time, found.steps_completed) == (10.0, 30.0, 7)


def test_a_disk_that_cannot_be_written_to_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    append_warning(tmp_path / "logs", KeptWarning(message="lost"), 0)
    assert read_warnings(RunDir(tmp_path)) == ()


def test_a_worker_of_a_data_loader_counts_its_own(keeper: WarningKeeper, tmp_path: Path) -> None:
    for _ in range(3):
        keeper.keep("slow", source="loop")  # the third is not written yet
    with keeper._lock:
        child = os.fork()
        if child == 0:
            keeper.keep("slow", source="loop")
            os._exit(0)
        os.waitpid(child, 0)
    keeper.end()
    assert kept(tmp_path) == [("WARNING", "slow", 4)]


def test_our_notes_are_kept_as_they_are_shown(keeper: WarningKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning_keeper, "KEEPER", keeper)
    assert warning_keeper.warned("warning: lost") == "warning: lost"
    (found,) = keeper._kinds.values()
    assert (found.message, found.source) == ("lost", "determined_ds")
