"""HTTP, here or on a test's machine: routes, who calls, a record of every call, and faults on request."""

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

from tests.cluster.state import Call, Json
from tests.harness.machines import Machine

# The codes of gRPC, from which a master makes its statuses.
GRPC = {
    400: (3, "InvalidArgument"),
    401: (16, "Unauthenticated"),
    403: (7, "PermissionDenied"),
    404: (5, "NotFound"),
    409: (6, "AlreadyExists"),
    500: (13, "Internal"),
    501: (12, "Unimplemented"),
}
FaultKind = Literal["500", "close", "close after", "hang", "answer", "answer after"]


class Refused(Exception):
    """What a handler refuses: a status of HTTP, and the reason, which Determined's client shows."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(kw_only=True)
class Fault:
    """A fault of the master, met by calls of tasks of one kind.

    ``close`` closes the connection unanswered, ``close after`` does it when the call has been obeyed; ``hang`` answers
    late; ``answer`` and ``answer after`` give another answer than ours.
    """

    kind: FaultKind
    method: str
    path: str  # a regular expression that the whole path matches
    times: int = 1  # how many calls meet it
    skip: int = 0  # how many are let through before
    seconds: float = 0.0  # how long it hangs
    status: int = 200  # of another answer
    body: Json = None
    task: str | None = None  # whose processes call; None: any task's
    met: int = field(default=0, init=False)

    def meets(self, call: Call) -> bool:
        """Whether it is this call that fails; counts those that are let through."""
        if (
            self.met >= self.times
            or self.method != call.method
            or re.fullmatch(self.path, call.path) is None
            or call.allocation is None
            or not call.allocation.startswith(f"{self.task}." if self.task else "")
        ):
            return False
        self.skip -= 1
        return self.skip < 0


Handler = Callable[..., Any]


class Server:
    """Answers HTTP at a port of loopback, in a thread for each connection.

    Args:
        handlers: Objects whose methods are routes, see :func:`route`.
        who: Token -> (user, allocation), one of them None; None where the token is not good.
        machine: In whose network it answers, too, at its address; at loopback it always does.

    Attributes:
        here: Where it answers this process.
        url: Where it answers a trial.
    """

    def __init__(
        self,
        handlers: list[object],
        who: Callable[[str], tuple[str | None, str | None] | None],
        machine: Machine | None = None,
    ) -> None:
        self._routes = [found for handler in handlers for found in _routes_of(handler)]
        self._who = who
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.calls: list[Call] = []
        self.errors: list[str] = []
        server = self

        class OneConnection(_Connection):
            owner = server

        self._listening = [_Http(("127.0.0.1", 0), OneConnection)]
        if machine:
            self._listening.append(machine.in_network(lambda: _Http((machine.address, 0), OneConnection)))
        self.here, self.url = (
            "http://{}:{}".format(*self._listening[index].server_address[:2]) for index in (0, -1)
        )
        self._threads = [
            threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True) for each in self._listening
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop answering."""
        for each in self._listening:
            each.shutdown()
            each.server_close()
        for thread in self._threads:
            thread.join()

    def inject(self, fault: Fault) -> Fault:
        """Have the next calls of a kind meet a fault."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def _fault_for(self, call: Call) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.meets(call):
                    fault.met += 1
                    return fault
        return None

    def _find(self, method: str, path: str) -> tuple[Handler, dict[str, str], bool]:
        for verb, pattern, handler, is_open in self._routes:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                return handler, match.groupdict(), is_open
        raise Refused(404, f"no such call: {method} {path}")

    def answer(self, call: Call) -> Any:
        """Obey a call.

        Raises:
            Refused: it is refused.
        """
        handler, parts, is_open = self._find(call.method, call.path)
        if not is_open and call.user is None and call.allocation is None:
            raise Refused(401, "invalid credentials")
        arguments = {name: int(text) if name.endswith("_id") else text for name, text in parts.items()}
        return handler(call, **arguments)


def route(method: str, path: str, *, is_open: bool = False) -> Callable[[Handler], Handler]:
    """Mark a method as the handler of a call.

    Args:
        method: ``GET`` ...
        path: With ``{name}`` for a part that becomes an argument; ``{..._id}`` is a number.
        is_open: Whether it is answered without a token.
    """

    def mark(handler: Handler) -> Handler:
        handler.route = (method, path, is_open)  # type: ignore[attr-defined]
        return handler

    return mark


def _routes_of(handlers: object) -> Iterator[tuple[str, str, Handler, bool]]:
    for name in dir(handlers):
        handler = getattr(handlers, name)
        if hasattr(handler, "route"):
            method, path, is_open = handler.route
            yield method, re.sub(r"\{(\w+)\}", _part, path), handler, is_open


def _part(match: re.Match[str]) -> str:
    name = match[1]
    return f"(?P<{name}>{'[0-9]+' if name.endswith('_id') else '[^/]+'})"


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
        length = int(self.headers.get("Content-Length") or 0)
        posted = self.rfile.read(length)
        call = Call(
            method=self.command,
            path=url.path,
            query={name: values[-1] for name, values in parse_qs(url.query).items()},
            repeated=parse_qs(url.query),
        )
        call.user, call.allocation = self.owner._who(self._token()) or (None, None)
        self.owner.calls.append(call)
        fault = self.owner._fault_for(call)
        if fault is not None:
            if fault.kind == "close":
                return self._hang_up()
            if fault.kind == "500":
                return self._refuse(call, 500, "an injected fault")
            if fault.kind == "answer":
                return self._send(call, fault.status, json.dumps(fault.body).encode())
            time.sleep(fault.seconds)
        try:
            call.body = json.loads(posted) if posted else None
            call.rank = self._find_rank()
            answer = self.owner.answer(call)
        except Refused as refused:
            return self._refuse(call, refused.status, refused.message)
        except Exception as error:
            self.owner.errors.append(f"{call.method} {call.path}: {type(error).__name__}: {error}")
            return self._refuse(call, 500, f"{type(error).__name__}: {error}")
        if fault is not None and fault.kind == "close after":
            return self._hang_up()
        if fault is not None and fault.kind == "answer after":
            return self._send(call, fault.status, b"")
        if isinstance(answer, Iterator):
            return self._stream(call, answer)
        return self._send(call, 200, json.dumps({} if answer is None else answer).encode())

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle

    def _token(self) -> str:
        value = (
            self.headers.get("Grpc-Metadata-x-allocation-token") or self.headers.get("Authorization") or ""
        )
        return value.removeprefix("Bearer ")

    def _find_rank(self) -> int | None:
        """``RANK`` in the environment of the process at the other end; a task's calls only."""
        if not self._looked and self.headers.get("Grpc-Metadata-x-allocation-token"):
            self._looked = True
            self._rank = rank_at(self.client_address[1])
        return self._rank

    def _send(self, call: Call, status: int, body: bytes) -> None:
        call.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, call: Call, status: int, message: str) -> None:
        code, reason = GRPC.get(status, (2, "Unknown"))
        error = {"code": code, "reason": reason, "error": message}
        self._send(call, status, json.dumps({"error": error}).encode())

    def _stream(self, call: Call, lines: Iterator[Json]) -> None:
        """One JSON a line, as they come."""
        call.status = 200
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            text = json.dumps({"result": line}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def rank_at(port: int) -> int | None:
    """``RANK`` of the process whose socket on loopback has this port."""
    for connection in psutil.net_connections("tcp4"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process(connection.pid).environ().get("RANK")
                return int(rank) if rank is not None else None
    return None
