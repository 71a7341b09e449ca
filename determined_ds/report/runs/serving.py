"""The page of runs on loopback, with new data as they train: what ``det-ds watch --page`` serves.

It answers on 127.0.0.1 alone, at an address with a secret in it, and to that name alone: no other user of the machine
can guess it, and no site that a browser has open can read it by pointing its own name here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError, DeterminedDSError, Problem
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.run_lock import is_held
from determined_ds.report.runs.located_runs import find_runs, read_one
from determined_ds.report.runs.run_view import RunView, labels
from determined_ds.report.runs.runs_page import runs_page

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")  # a browser's names for it; the port is another one where it is forwarded
EVERY_S = 3.0
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest of it is in the page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page as the run directories are now; what has not changed is not read again.

    Args:
        folders: Run directories, or folders that hold some, where more may come.
        every_s: How often the page looks for new data.
    """

    def __init__(self, folders: Sequence[Path], *, every_s: float = EVERY_S) -> None:
        self._folders = folders
        self._every_s = every_s
        self._known: dict[tuple[Path, str], tuple[object, RunView]] = {}
        self._page = ("", "")
        self._lock = threading.Lock()

    def now(self) -> tuple[str, str]:
        """The page and its tag, which is another one for another page.

        Raises:
            ConfigError: the folders hold no run.
        """
        with self._lock:
            paths = find_runs(self._folders)
            runs, is_new = [], False
            for key in zip(paths, labels(paths), strict=True):
                traces, known = _traces(key[0]), self._known.get(key)
                if known is None or known[0] != traces:
                    known, is_new = (traces, read_one(*key)), True
                    self._known[key] = known
                runs.append(known[1])
            if is_new or not self._page[0]:
                page = runs_page(runs, live_s=self._every_s)
                self._page = (page, f'"{hashlib.sha256(page.encode()).hexdigest()[:32]}"')
            return self._page


def _traces(path: Path) -> object:
    """Another value once anything that the page shows of a run has changed."""
    there = RunDir(path)
    files = [there.metrics, there.launches, there.result, there.experiment, there.checkpoints]
    files += sorted(there.logs.glob("warnings-rank*.jsonl"))
    return is_held(path), [_state(file) for file in files]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class PageServer(ThreadingHTTPServer):
    """Serves a live page on loopback.

    Args:
        page: The page.
        port: 0 for a free one.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        self.path = f"/{secrets.token_urlsafe(16)}/"
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}{self.path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is not worth a traceback."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "det-ds", ""

    def do_GET(self) -> None:
        """The page, for whom knows its address."""
        host = (self.headers.get("Host") or "").lower().rpartition(":")
        if (host[0] or host[2]) not in HOSTS:
            self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, "This server answers to 127.0.0.1 and localhost only.\n"
            )
            return
        if not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            self._answer(HTTPStatus.NOT_FOUND, "The address that det-ds watch has printed is another one.\n")
            return
        try:
            page, tag = self.server.page.now()
        except DeterminedDSError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
            return
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "", tag=tag)
        else:
            self._answer(HTTPStatus.OK, page, kind="text/html", tag=tag)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: str, *, kind: str = "text/plain", tag: str = "") -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, **({"ETag": tag} if tag else {})}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """A line for each look would hide what matters."""


def serve_page(
    folders: Sequence[Path], *, port: int = 0, ready: Callable[[str], object], every_s: float = EVERY_S
) -> None:
    """Serve the page of runs until Ctrl-C.

    Args:
        folders: As of :class:`LivePage`.
        port: 0 for a free one.
        ready: Called with the address, once it answers.
        every_s: As of :class:`LivePage`.

    Raises:
        ConfigError: the folders hold no run, or the port is taken.
    """
    page = LivePage(folders, every_s=every_s)
    page.now()
    try:
        server = PageServer(page, port)
    except OSError as error:
        message = f"cannot be used: {error.strerror or error}"
        fix = "give another --port, or leave it out for a free one"
        raise ConfigError(Problem(key="--port", value=port, message=message, fix=fix, code="port")) from None
    with server:
        ready(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
