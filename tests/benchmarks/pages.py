"""The page of ten runs with 10,000 reports each: how long it takes to build, its size, and until it is drawn.

    python -m tests.benchmarks.pages [TURNS]

A page in Chromium's window of 1,400 x 1,800 pixels reports the moment at which its first picture is drawn, and the
moment at which all of those in view are.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.runs.located_runs import find_runs, read_runs
from determined_ds.report.runs.runs_page import runs_page
from tests.browser import CHROMIUM
from tests.report.recorded import BEGAN, launch, recorded, training, validation

RUNS, REPORTS, BATCHES = 10, 10_000, 10
# Runs in a copy of the page before all else: tells the server when the first and the last picture were drawn.
CLOCK = """
let first = 0, count = 0, still = 0;
(function look() {
  const now = document.querySelectorAll("canvas").length;
  if (now && !first) first = performance.now();
  still = now === count ? still + 1 : 0;
  count = now;
  if (now && still > 30) fetch(`/done?first=${first}&pictures=${now}`);
  else requestAnimationFrame(look);
})();
"""


def reports(seed: int) -> Iterator[dict[str, Any]]:
    """What a run of a day reports: twelve metrics, and a validation at each hundredth report."""
    draw, at = random.Random(seed), BEGAN + 5
    for number in range(1, REPORTS + 1):
        at += 8 + draw.random()
        loss = 2 + 3 * math.exp(-number / (2000 + 300 * seed)) + draw.gauss(0, 0.1)
        metrics = {
            "loss": loss,
            "lr": 1e-3 * (1 - number / REPORTS),
            "grad_norm": abs(draw.gauss(1, 0.3)),
            "accuracy": 1 - math.exp(-number / 5000) + draw.gauss(0, 0.01),
            "aux_loss": draw.random(),
            "samples_per_second": draw.gauss(1000, 30),
            "tokens_per_second": draw.gauss(128_000, 3000),
            "peak_memory_gib": 12.3 + min(number, 50) / 100,
            "peak_memory_gib_min": 12.1,
            "memory_allocated_gb": draw.gauss(10, 0.1),
            "memory_reserved_gb": 14.5,
            "batches": number * BATCHES,
        }
        yield training(number * BATCHES, time=round(at, 3), **metrics)
        if number % 100 == 0:
            yield validation(number * BATCHES, time=round(at, 3), validation_loss=loss + 0.1)


def made(folder: Path) -> list[Path]:
    """The runs."""
    for seed in range(RUNS):
        rate = launch(hyperparameters={"learning_rate": 1e-3 * (seed + 1)})
        run = recorded(folder / f"run{seed}", launches=[rate], checkpoints=range(5000, 100_001, 5000))
        with RunDir(run).metrics.open("w") as file:
            file.writelines(json.dumps(report) + "\n" for report in reports(seed))
    return find_runs([folder])


class _Drawn(BaseHTTPRequestHandler):
    """Serves the page, and hears when it is drawn."""

    page = b""
    found: ClassVar[dict[str, float]] = {}
    done = threading.Event()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.send_response(200)
        self.end_headers()
        if url.path == "/":
            self.wfile.write(self.page)
        elif url.path == "/done":
            _Drawn.found = {name: float(values[0]) for name, values in parse_qs(url.query).items()}
            self.done.set()

    def log_message(self, *args: Any) -> None:
        """Nothing is said."""


def drawn(page: str) -> dict[str, float]:
    """Milliseconds from navigation until the first picture is drawn, and how many there are."""
    assert CHROMIUM is not None, "no Chromium is installed"
    free = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', f"<script>{CLOCK}</script>", page, count=1
    )
    _Drawn.page = free.encode()
    _Drawn.done.clear()
    server = HTTPServer(("127.0.0.1", 0), _Drawn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1800",
        "--remote-debugging-port=0",
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        browser = subprocess.Popen(
            [CHROMIUM, *words, f"--user-data-dir={profile}", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert _Drawn.done.wait(60), "nothing was drawn"
        finally:
            browser.terminate()
            browser.wait(30)
            server.shutdown()
    return _Drawn.found


def table(turns: int) -> str:
    """The figures, as a table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        paths = made(Path(folder))
        began = time.process_time()
        page = runs_page(read_runs(paths))
        built_s = time.process_time() - began
    times = [drawn(page) for _ in range(turns)]
    first = [each["first"] for each in times]
    spread = f"{statistics.median(first):.0f}, {min(first):.0f}, {max(first):.0f}"
    rows = [
        ("built, s of a core", f"{built_s:.1f}"),
        ("size, MB", f"{len(page.encode()) / 1e6:.2f}"),
        (f"first picture, ms (of {turns}: median, lowest, highest)", spread),
        ("pictures in view", f"{times[0]['pictures']:.0f}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
