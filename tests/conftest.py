"""What every test may have (ranks, machines, S3), and how a session runs: see README.md, beside this file.

``make test`` has pytest-xdist run as many files at once as there are workers, each file by one worker. So that any two
files may meet, a test must not ask for a port by its number, nor look at processes that it did not start.
"""

from __future__ import annotations

import collections
import fcntl
import gc
import logging
import os
import secrets
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from tests import short_cases
from tests.harness import forked, required
from tests.harness.browser import CHROMIUM
from tests.harness.machines import Machine, joined_machines, why_no_machines
from tests.harness.ranks import ROOT, Ranks, RanksOf

# `make test` tries the same examples each time, and can be relied on; `make test-all` explores: new ones each time, and
# it says how to try one again. How long an example takes says nothing of whether it is right.
UNCHECKED = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
SAME: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": UNCHECKED}
hypothesis.settings.register_profile("few", derandomize=True, max_examples=25, **SAME)
hypothesis.settings.register_profile("explore", derandomize=False, max_examples=200, **SAME)
hypothesis.settings.load_profile("few")  # make test-all: --hypothesis-profile=explore

# The same numbers whatever else runs; and it is processes that use the cores, not threads. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


# Threads of Determined's that ask a master log what goes wrong, also once a test has ended with its master. To format a
# traceback, Python 3.11 parses code, which two threads must not do at once: `SystemError: AST constructor recursion
# depth mismatch` in the other one, be it a test or pytest itself. Source: python/cpython#106905.
logging.getLogger("determined.core").addFilter(_without_traceback)

# Collecting loads torch, transformers and every test, and all of it stays: a quarter of the time would go into looking
# for garbage in it.
gc.disable()


def pytest_collection_finish() -> None:
    """From now on there is garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


# ------------------------------------------------------------------------------------------- long tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hold every mark ``long`` to a reason; side by side, begin with the files that take longest."""
    short_cases.mark_long_cases(items)
    if not config.option.file_or_dir and (names := short_cases.unknown(items)):
        raise pytest.UsageError(f"tests/short_cases.py names what is not a test: {', '.join(names)}")
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is not None and not (len(mark.args) == 1 and isinstance(mark.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: write long(reason): what it proves beyond a short test")
    if (tenth := config.getoption("--long-tenth")) is not None:

        def is_of_it(item: pytest.Item) -> bool:
            mine = zlib.crc32(item.nodeid.encode()) % 10 == tenth % 10
            return mine and item.get_closest_marker("long") is not None

        config.hook.pytest_deselected(items=[item for item in items if not is_of_it(item)])
        items[:] = filter(is_of_it, items)
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this project."""
    parser.addoption("--long-tenth", type=int, default=None, help="run a tenth of the long tests, 0 to 9")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested for want of something, with what to install."""
    missing: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        name = reason.removeprefix("Skipped: ").partition(":")[0]
        missing[name] += name in required.INSTALL
    for name, count in (+missing).most_common():
        terminalreporter.write_line(f"{count} tests not run for want of {name}: {required.INSTALL[name]}")


# ------------------------------------------------------------------------------------------- apart


@pytest.fixture(autouse=True)
def _models_of_this_test_alone() -> Iterator[None]:
    """What a command in this process imports of a user's folder (``trial``) is not found by the next test."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        of_all = (sys.prefix, sys.base_prefix, str(ROOT / "determined_ds"))
        if file and not file.startswith(of_all) and not name.startswith(("tests.", "model_defs")):
            del sys.modules[name]


# ------------------------------------------------------------------------------------------- side by side

# The memory of a worker with its ranks, less what they share with those of the others.
BYTES_A_WORKER = 2**30
# What takes longest begins first, so that all end together; and the largest programs before that, since a worker grows
# to twice its size. Those wait for one another (see `programs`), so that others stand between them.
FIRST = (
    "interrupted",
    "cluster/test_follow.py",
    "train/loop/test_stopping.py",
    "cli/test_run_as_rank.py",
    "memory",
    "experiments/test_templates.py",
    "cluster",
    "search/test_local_search.py",
    "model_defs",
    "launch",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``: one more than there are cores, since clusters that poll leave some idle."""
    if stated := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(stated)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores + 1, psutil.virtual_memory().available // BYTES_A_WORKER))


def pytest_configure(config: pytest.Config) -> None:
    """Have the workers forked off one server; their hashes are the same, since sets are among the parameters."""
    config.addinivalue_line(
        "markers", "long(reason): make test leaves it out; what it proves beyond a short one"
    )
    config.addinivalue_line("markers", "programs: starts several programs that load torch, each for itself")
    if getattr(config.option, "tx", None):
        os.environ.setdefault("PYTHONHASHSEED", str(secrets.randbelow(2**32)))
        profile = config.getoption("--hypothesis-profile")
        forked.address([f"--hypothesis-profile={profile}"] * bool(profile) + config.args)
        try:
            forked.Forked("builtins:int", env=os.environ, files=[0, 1, 2]).wait()
        except forked.ServerFailed as error:
            raise pytest.UsageError(str(error)) from None
        python = f"{sys.executable} {ROOT / 'tests/harness/worker.py'}"
        config.option.tx = [
            f"popen//python={python}" if spec == "popen" else spec for spec in config.option.tx
        ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of the tests whose programs take a gigabyte or more, run one at a time."""
    large = item.get_closest_marker("programs") or "machines" in getattr(item, "fixturenames", ())
    if not (large and hasattr(item.config, "workerinput")):
        return (yield)
    shared = os.open(Path(item.config.option.basetemp).parent, os.O_RDONLY)  # that of all workers
    try:
        fcntl.flock(shared, fcntl.LOCK_EX)
        return (yield)
    finally:
        fcntl.flock(shared, fcntl.LOCK_UN)  # also where a process of the test has it still
        os.close(shared)


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(ROOT / "tests").as_posix()
    return next((number for number, start in enumerate(FIRST) if path.startswith(start)), len(FIRST))


# ------------------------------------------------------------------------------------------- ranks


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """A rank alone: a process of its own, since joining a process group changes the process that does."""
    return Ranks(1, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two ranks."""
    return Ranks(2, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Four ranks."""
    return Ranks(4, tmp_path_factory.mktemp("four_ranks"))


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest) -> RanksOf:
    """``ranks_of(number)``: so many of these; they start when they are asked for."""
    names = {1: "one_rank", 2: "two_ranks", 4: "four_ranks"}
    return lambda number: request.getfixturevalue(names[number])  # type: ignore[no-any-return]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, joined by a switch (see ``machines.py``). As root only."""
    if reason := why_no_machines():
        required.skip_or_fail("machines", reason)
    with joined_machines(tmp_path / "machines") as both:
        yield both


@pytest.fixture(scope="session")
def browser() -> None:
    """Chromium is installed."""
    if CHROMIUM is None:
        required.skip_or_fail("browser", "no Chromium is installed")


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """``checkpoint_storage`` of an S3 server on this machine (see ``object_storage.py``)."""
    from tests.harness.object_storage import s3_server

    with s3_server() as storage:
        yield storage


@pytest.fixture
def storage(s3: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A ``checkpoint_storage`` of its own there, empty."""
    return {**s3, "prefix": tmp_path.name}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(size_bytes)``: a folder on a disk of that size. As root only: it takes a mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size_bytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            required.skip_or_fail("disk", done.stderr.strip())
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], check=False)
