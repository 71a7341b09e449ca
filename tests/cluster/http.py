"""The master's HTTP: who calls, a record of every call, and faults on request."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

import psutil
from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server

Json = Any
LATE_S = 4.0


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


class Refused(Exception):
    """What the master refuses: a status of HTTP, and the reason, which Determined's client shows."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class Call:
    """A call of a user or of a task; ``rank`` is ``RANK`` of its process, ``status`` None where no answer was given."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Json = None
    user: str | None = None
    allocation: str | None = None
    rank: int | None = None
    status: int | None = None


@dataclass(kw_only=True)
class Fault:
    """What the next call of a task meets, to a path of this pattern.

    ``close after`` obeys the call and closes the connection unanswered; ``answer`` gives another answer than
    ours, and ``answer after`` does so once the call is obeyed; ``late`` answers after some seconds.
    """

    kind: Literal["close after", "answer", "answer after", "late"]
    method: str
    path: str
    status: int = 200
    body: Json = None
    is_met: bool = field(default=False, init=False)
    answered: str = field(default="", init=False)  # when a late answer was given

    def meets(self, call: Call) -> bool:
        is_such = call.allocation and call.method == self.method and re.fullmatch(self.path, call.path)
        if self.is_met or not is_such:
            return False
        self.is_met = True
        return True


class Server:
    """Answers at ``url``, in a thread for each call.

    ``who`` knows the user or the allocation of a token. ``answer`` returns what is sent as JSON, or an iterator that is
    sent line by line; what it raises but :class:`Refused` is kept in ``errors``.
    """

    def __init__(
        self,
        who: Callable[[str], tuple[str | None, str | None]],
        answer: Callable[[Call], Any],
    ) -> None:
        self._who, self._answer = who, answer
        self.calls: list[Call] = []
        self.errors: list[str] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

        self._server = make_server("127.0.0.1", 0, self._obey, threaded=True, request_handler=_Handler)
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @Request.application
    def _obey(self, request: Request) -> Response:
        call = Call(method=request.method, path=request.path, query=request.args.to_dict(flat=False))
        of_task = request.headers.get("Grpc-Metadata-x-allocation-token")
        token = of_task or request.headers.get("Authorization", "")
        call.user, call.allocation = self._who(token.removeprefix("Bearer "))
        self.calls.append(call)
        with self._lock:
            fault = next((fault for fault in self.faults if fault.meets(call)), None)
        if fault and fault.kind == "answer":
            return _response(call, fault.status, json.dumps(fault.body))
        if fault and fault.kind == "late":
            time.sleep(LATE_S)
            fault.answered = now()
        try:
            call.body = json.loads(request.data) if request.data else None
            call.rank = _rank_at(request.environ["REMOTE_PORT"]) if of_task else None
            answer = self._answer(call)
        except Exception as error:
            status, said = getattr(error, "status", 500), str(error)
            if not isinstance(error, Refused):
                said = f"{type(error).__name__}: {error}"
                self.errors.append(f"{call.method} {call.path}: {said}")
            refusal = {"code": status, "reason": "refused", "error": said}
            return _response(call, status, json.dumps({"error": refusal}))
        if fault and fault.kind == "close after":
            raise ConnectionResetError
        if fault and fault.kind == "answer after":
            return _response(call, fault.status, "")
        if isinstance(answer, Iterator):
            return _response(call, 200, (json.dumps({"result": line}) + "\n" for line in answer))
        return _response(call, 200, json.dumps({} if answer is None else answer))


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # for answers that are sent in chunks

    def log(self, *args: Any) -> None:
        """The record of calls says it all."""

    def connection_dropped(self, *args: Any) -> None:
        self.close_connection = True


def _response(call: Call, status: int, body: str | Iterator[str]) -> Response:
    call.status = status
    return Response(body, status, content_type="application/json")


def _rank_at(port: int) -> int | None:
    """``RANK`` of the process whose socket on loopback has this port."""
    for connection in psutil.net_connections("tcp4"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                rank = psutil.Process(connection.pid).environ().get("RANK")
                return int(rank) if rank is not None else None
    return None
