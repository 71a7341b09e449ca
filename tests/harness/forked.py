"""Processes started by a fork: 20 ms where a start that loads torch, DeepSpeed and transformers is 4 s of a core.

One server for each test session loads what ranks load and then forks on request. It has one thread and keeps no state,
so a fork is as good as a new process, and all of them share its memory. :func:`tests.harness.command.det_ds`,
:class:`tests.harness.ranks.Ranks` and the workers of pytest-xdist are its forks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
# Environment variable with the address of the server, for workers of the same session.
ADDRESS = "DETERMINED_DS_TESTS_FORKS"
SERVER = "import sys; from tests.harness.forked import serve; serve(int(sys.argv[1]), sys.argv[2:])"
# Everything that a rank may load. Two of them leave a thread behind and stay out: pyarrow and scikit-learn's OpenMP.
LOADED = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "deepspeed.accelerator.cuda_accelerator",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_comm",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "determined.cli.cli",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.vit.modeling_vit",
    "peft",
    "psutil",
    "pytest",
)
MESSAGE_BYTES = 2**18
# Environment variable that a process hands on to whatever it starts, by fork or as a program, in any session.
MARK = "DETERMINED_DS_TESTS_MARK"
NO_MARK = "0" * 32


class ServerFailed(RuntimeError):
    """The server of forks could not load what it forks."""


class Forked:
    """A function (``module:name``) in a process of its own, ended with what it returns; used like a ``Popen``.

    ``files`` are descriptors to be its stdin, stdout, stderr and 3. Dropped or closed, it is killed.
    """

    def __init__(
        self,
        function: str,
        *args: Any,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        files: Sequence[int],
    ) -> None:
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(f"\0{address()}")
        socket.send_fds(self._server, [pickle.dumps((function, args, dict(env), str(cwd)))], list(files))
        answer = self._server.recv(MESSAGE_BYTES).decode()
        if not answer.isdigit():
            raise ServerFailed(f"no process can be forked: {answer or 'the server was killed'}")
        self.pid = int(answer)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            self._server.settimeout(timeout if timeout is None else max(timeout, 1e-6))
            try:
                self.returncode = int(self._server.recv(MESSAGE_BYTES))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is under way
                os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it and what is left of its process group, unless its end was waited for."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)
            self.wait()


def marked(mark: str, name: str = MARK) -> dict[int, str]:
    """The ids and commands of all processes that have this value of an environment variable."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_marked = f"{name}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            if is_marked and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(process.name)] = words.strip()
    return found


def _carry(mark: str) -> None:
    """Have the environment that the system shows of this fork, which is the server's, name this mark."""
    place = Path("/proc/self/environ").read_bytes().find(f"{MARK}=".encode())
    if place >= 0 and len(mark) == len(NO_MARK):
        env_start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
        ctypes.memmove(env_start + place + len(MARK) + 1, mark.encode(), len(mark))


def address(collected: Sequence[str] = ()) -> str:
    """Of the server of this session; the first to ask starts it, and it ends with the process that did.

    ``collected`` are words of pytest's command line: tests that its forks will collect, and that it loads for them.
    """
    if known := os.environ.get(ADDRESS):
        return known
    name = f"determined_ds-tests-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")  # in no folder, so that it is there in a container too
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno()), *collected],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", MARK: NO_MARK},
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    os.environ[ADDRESS] = name
    return name


# ------------------------------------------------------------------------------------------- in the server


def serve(descriptor: int, collected: list[str]) -> None:
    """Fork whatever a connection asks for, and answer with its process id and its exit code, or why it cannot."""
    try:
        failure = _load(collected)
    except BaseException:
        failure = traceback.format_exc()
    listener = socket.socket(fileno=descriptor)
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin.fileno(), selectors.EVENT_READ, ("owner",))
        ready.register(listener, selectors.EVENT_READ, ("listener",))
        while True:
            for key, _ in ready.select():
                match key.data:
                    case ("owner",):
                        return
                    case ("listener",):
                        connection, _ = listener.accept()
                        message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 16)
                        if failure:
                            connection.send(failure.encode()[-MESSAGE_BYTES // 4 :])
                            connection.close()
                            continue
                        if (pid := os.fork()) == 0:
                            ready.close()
                            listener.close()
                            connection.close()
                            _serve_one(pickle.loads(message), files)
                        for file in files:
                            os.close(file)
                        connection.send(str(pid).encode())
                        ready.register(connection, selectors.EVENT_READ, ("connection", pid))
                        ready.register(os.pidfd_open(pid), selectors.EVENT_READ, ("process", pid, connection))
                    case ("connection", pid):  # whoever started it has ended, or dropped it
                        ready.unregister(key.fileobj)
                        with contextlib.suppress(OSError):
                            os.killpg(pid, signal.SIGKILL)
                    case ("process", pid, connection):
                        ready.unregister(key.fd)
                        os.close(key.fd)
                        _, status = os.waitpid(pid, 0)
                        with contextlib.suppress(KeyError):
                            ready.unregister(connection)
                        with contextlib.suppress(OSError):
                            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                        connection.close()


def _load(collected: Sequence[str]) -> str:
    """Load what forks use, and what they collect. Returns why they cannot be forked, if so."""
    gc.disable()
    # Deepspeed's autotuner loads it where it is installed, and with it pyarrow, which starts a thread.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    importlib.import_module("tests.package").load_as_a_rank_does()
    for name in LOADED:
        importlib.import_module(name)
    del sys.modules["mlflow"]
    importlib.import_module("deepspeed.ops").__compatible_ops__  # asks a compiler
    if collected:
        import pytest

        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *collected])
        gc.disable()  # conftest.py has enabled it
    gc.collect()
    gc.freeze()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    if len(names) == 1:
        return ""
    return f"an import of a rank or a test starts a thread ({', '.join(names)}): import it where it is needed"


def _serve_one(request: tuple[str, tuple[Any, ...], dict[str, str], str], files: list[int]) -> NoReturn:
    """In the fork: call the function of a request."""
    function, args, env, cwd = request

    def call() -> Any:
        import numpy

        random.seed()
        numpy.random.seed()  # torch's generator is as in any new process
        gc.enable()
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(*args)

    os.setsid()
    _become(call, env, Path(cwd), dict(enumerate(files)))


def _become(call: Callable[[], Any], env: Mapping[str, str], cwd: Path, files: Mapping[int, int]) -> NoReturn:
    """End this process with what a function returns, in a process group, an environment and a folder of its own."""
    code: Any = 70
    try:
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        for descriptor, file in files.items():
            os.dup2(file, descriptor)
        for file in {*files.values()} - {*files}:
            os.close(file)
        os.environ.clear()
        os.environ.update(env)
        _carry(env.get(MARK, NO_MARK))
        os.chdir(cwd)
        sys.path[0] = str(cwd)
        code = call()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # a pipe that its reader has closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


# ------------------------------------------------------------------------------------------- programs


def worker() -> None:
    """A worker of pytest-xdist, which reads its program from stdin; see ``worker.py``."""
    os.environ.pop("PYTHONHASHSEED", None)  # of this process alone; see conftest.py
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


def det(words: list[str]) -> None:
    """Determined's command line."""
    from determined.cli import cli

    sys.argv = ["det", *words]
    cli.main(words)


def det_ds(words: list[str]) -> None:
    """``det-ds``: the runs that it starts, and the ranks that those start, are forks of it."""
    from determined_ds.cli.main import main
    from tests.package import start_by_forks

    start_by_forks(fork_rank, fork_run)
    # A program loads models from the folder where it is started, and knows no tests.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("model_defs", "tests"):
            del sys.modules[name]
    sys.argv = ["det-ds", *words]
    sys.path[0] = str(Path(sys.executable).parent)
    main(words)


def fork_rank(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    log: Path | None,
    keep_open: Sequence[int],
) -> Child:
    """In place of ``rank.start_process``: what ``python3 -m determined_ds.train`` or ``determined_ds.script`` does."""
    name = {"determined_ds.train": "determined_ds.train.__main__"}.get(command[2], command[2])
    main = importlib.import_module(name).main
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        return Child(main, command, environment, cwd, output.fileno() if output else None)


def fork_run(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **options: object
) -> Child:
    """In place of ``trial_process.subprocess.Popen``: what ``python3 -m determined_ds.cli`` does."""
    from determined_ds.cli.main import main

    return Child(main, command, env, Path.cwd(), stdout.fileno())


class Child:
    """A fork of this process that runs a module's ``main`` by ``python3 -m MODULE WORDS``. Like a ``Popen``."""

    def __init__(
        self,
        main: Callable[[list[str]], Any],
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        output: int | None,
    ) -> None:
        self._code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            sys.argv = list(command[2:])
            files = {} if output is None else {1: output, 2: output}
            _become(lambda: main(sys.argv[1:]), env, cwd, files)
        with contextlib.suppress(OSError):  # it may have ended
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self._code is not None
        return self._code
