"""The live page: on loopback, for whom has its address, with new data as they come."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from determined_ds.errors import ConfigError
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.runs.serving import LivePage, PageServer, serve_page
from tests.report.recorded import course, recorded, training
from tests.report.test_page import Page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run", course(10))


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    server = PageServer(LivePage([run], every_s=0.5))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with server:
        yield server
        server.shutdown()
    thread.join()


def get(server: PageServer, path: str | None = None, *, method: str = "GET", **headers: str) -> Any:
    """The answer and its text."""
    there = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    there.request(method, server.path if path is None else path, headers=headers)
    answer = there.getresponse()
    return answer, answer.read().decode()


def test_it_is_the_page_with_what_has_come_since(server: PageServer, run: Path) -> None:
    answer, text = get(server)
    assert answer.status == 200
    assert Page(text).texts["p"][0].startswith("Not finished: 10 of 40 batches")
    assert "connect-src 'self'" in text
    assert "New data every 0.5 seconds" in text
    tag = answer.headers["ETag"]
    again, nothing = get(server, **{"If-None-Match": tag})
    assert (again.status, nothing) == (304, "")
    append_record(RunDir(run).metrics, training(11, loss=0.5))
    new, text = get(server, **{"If-None-Match": tag})
    assert new.status == 200
    assert Page(text).texts["p"][0].startswith("Not finished: 11 of 40 batches")


def test_what_has_not_changed_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LivePage([run])
    first = page.now()
    monkeypatch.setattr("determined_ds.report.runs.serving.read_one", None)
    assert page.now() is first


def test_trials_that_begin_meanwhile_are_on_the_page(tmp_path: Path) -> None:
    recorded(tmp_path / "trials" / "0001", course(10))
    page = LivePage([tmp_path])
    assert "trial 2" not in page.now()[0]
    recorded(tmp_path / "trials" / "0002", course(10))
    assert "trial 2" in page.now()[0]


@pytest.mark.parametrize("host", ["example.com", "example.com:80", "127.0.0.1.example.com", ""])
def test_other_names_are_refused(server: PageServer, host: str) -> None:
    answer, text = get(server, Host=host)
    assert answer.status == 421
    assert "gpt2" not in text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8888", "127.0.0.1:1"])
def test_names_of_loopback_are_not_whatever_port_is_forwarded(server: PageServer, host: str) -> None:
    assert get(server, Host=host)[0].status == 200


@pytest.mark.parametrize("path", ["/", "/guess/", "//", "/../etc/passwd"])
def test_without_its_address_there_is_nothing(server: PageServer, path: str) -> None:
    answer, text = get(server, path)
    assert answer.status == 404
    assert "gpt2" not in text


def test_it_takes_no_other_method(server: PageServer) -> None:
    assert get(server, method="POST")[0].status == 501
    answer, text = get(server, method="HEAD")
    assert (answer.status, text) == (200, "")


def test_it_listens_on_loopback_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}{server.path}"
    assert len(server.path) > 20


def test_a_run_that_was_removed_is_an_error_of_the_server(server: PageServer, run: Path) -> None:
    get(server)
    (run / "experiment.yaml").unlink()
    answer, text = get(server)
    assert answer.status == 503
    assert "holds no run" in text


def test_a_port_that_is_taken_is_an_error_with_a_fix(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            serve_page([run], port=taken.getsockname()[1], ready=lambda url: None)


def test_a_folder_without_a_run_is_refused_before_it_serves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        serve_page([tmp_path], ready=lambda url: pytest.fail(url))


def test_ctrl_c_ends_it(run: Path) -> None:
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start()

    serve_page([run], ready=ready)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(urls[0].split(":")[2].split("/")[0])), timeout=5)
