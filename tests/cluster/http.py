"""The master's HTTP, here or on a test's machine: who calls, a record of every call, and faults on request."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import psutil

from tests.harness.machines import Machine

Json = Any
# The codes of gRPC, from which a master makes its statuses.
GRPC = {
    400: (3, "InvalidArgument"),
    401: (16, "Unauthenticated"),
    404: (5, "NotFound"),
    500: (13, "Internal"),
}


class Refused(Exception):
    """What the master refuses: a status of HTTP, and the reason, which Determined's client shows."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class Call:
    """A call that the master was sent, by a user or by a task."""

    method: str
    path: str  # without the query
    query: dict[str, list[str]]
    body: Json = None  # what was posted, from JSON
    user: str | None = None
    allocation: str | None = None  # whose task called
    rank: int | None = None  # ``RANK`` of the process that called, where it has one
    status: int | None = None  # None where no answer was given

    def asked(self, name: str, default: Any = "") -> str:
        """A parameter of the query."""
        return str(self.query.get(name, [default])[-1])


@dataclass(kw_only=True)
class Fault:
    """A fault of the master, met by calls of tasks.

    ``close after`` obeys the call and closes the connection unanswered; ``hang`` answers late; ``answer`` gives another
    answer than ours, and ``answer after`` does so once the call is obeyed.
    """

    kind: Literal["close after", "hang", "answer", "answer after"]
    method: str
    path: str  # a regular expression that the whole path matches
    times: int = 1  # how many calls meet it
    skip: int = 0  # how many are let through before
    seconds: float = 0.0  # how long it hangs
    status: int = 200  # of another answer
    body: Json = None
    task: str = ""  # whose processes call; empty: any task's
    met: int = field(default=0, init=False)

    def meets(self, call: Call) -> bool:
        """Whether it is this call that fails; counts those that are let through and those that are not."""
        of_task = call.allocation is not None and call.allocation.startswith(self.task)
        is_meant = of_task and self.method == call.method and re.fullmatch(self.path, call.path)
        if not is_meant or self.met >= self.times:
            return False
        self.skip -= 1
        self.met += self.skip < 0
        return self.skip < 0


class Server:
    """Answers HTTP at a port of loopback, in a thread for each connection.

    Args:
        who: Token -> (user, allocation), of which one is None, or both.
        answer: Obeys a call, and returns what is sent as JSON; an iterator is sent line by line.
        machine: In whose network it answers, too, at its address.

    Attributes:
        here: Where it answers this process.
        url: Where it answers a trial.
        errors: What went wrong in ``answer`` other than a refusal.
    """

    def __init__(
        self,
        who: Callable[[str], tuple[str | None, str | None]],
        answer: Callable[[Call], Any],
        machine: Machine | None = None,
    ) -> None:
        self.who, self.answer = who, answer
        self.calls: list[Call] = []
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

        class Connection(_Connection):
            owner = self

        self._listening = [_Http(("127.0.0.1", 0), Connection)]
        if machine:
            self._listening.append(machine.in_network(lambda: _Http((machine.address, 0), Connection)))
        urls = ["http://{}:{}".format(*each.server_address[:2]) for each in self._listening]
        self.here, self.url = urls[0], urls[-1]
        for each in self._listening:
            threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        for each in self._listening:
            each.shutdown()
            each.server_close()

    def inject(self, fault: Fault) -> Fault:
        """Have the next calls of a kind meet a fault."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def fault_of(self, call: Call) -> Fault | None:
        """The fault that a call meets, if any."""
        with self._lock:
            return next((fault for fault in self._faults if fault.meets(call)), None)


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no error of ours."""


class _Connection(BaseHTTPRequestHandler):
    """One connection: several calls, one after the other."""

    protocol_version = "HTTP/1.1"
    owner: Server
    _rank: int | None = None
    _looked = False

    def log_message(self, format: str, *args: Any) -> None:
        """The record of calls says it all."""

    def _handle(self) -> None:
        url = urlsplit(self.path)
        posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = Call(method=self.command, path=url.path, query=parse_qs(url.query))
        of_task = self.headers.get("Grpc-Metadata-x-allocation-token")
        token = of_task or self.headers.get("Authorization") or ""
        call.user, call.allocation = self.owner.who(token.removeprefix("Bearer "))
        self.owner.calls.append(call)
        fault = self.owner.fault_of(call)
        kind = fault.kind if fault else ""
        if fault and kind == "answer":
            return self._send(call, fault.status, fault.body)
        time.sleep(fault.seconds if fault else 0)
        try:
            call.body = json.loads(posted) if posted else None
            if of_task and not self._looked:
                self._looked, self._rank = True, rank_at(self.client_address[1])
            call.rank = self._rank
            answer = self.owner.answer(call)
        except Exception as error:
            status, said = getattr(error, "status", 500), str(error)
            if not isinstance(error, Refused):
                said = f"{type(error).__name__}: {error}"
                self.owner.errors.append(f"{call.method} {call.path}: {said}")
            code, reason = GRPC[status]
            return self._send(call, status, {"error": {"code": code, "reason": reason, "error": said}})
        if kind == "close after":
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return None
        if fault and kind == "answer after":
            return self._send(call, fault.status)
        return self._send(call, 200, {} if answer is None else answer)

    do_GET = do_POST = do_PATCH = do_PUT = _handle

    def _send(self, call: Call, status: int, *answer: Json) -> None:
        """Send an answer; an iterator's items as one JSON a line, as they come."""
        call.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if answer and isinstance(answer[0], Iterator):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in answer[0]:
                text = json.dumps({"result": line}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            self.wfile.write(b"0\r\n\r\n")
        else:
            body = json.dumps(answer[0]).encode() if answer else b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def rank_at(port: int) -> int | None:
    """``RANK`` of the process whose socket on loopback has this port."""
    for connection in psutil.net_connections("tcp4"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process(connection.pid).environ().get("RANK")
                return int(rank) if rank is not None else None
    return None
