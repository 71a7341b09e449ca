"""What ``hyperparameters.logging`` costs: a step of 200 ms with every tool at once, beside the same without any.

    python -m tests.benchmarks.team_tools          # five minutes; on how many cores it ran is printed

Steps are products of matrices. Blocks of them with reports and without are interleaved; between two blocks the process
of the tools comes to rest. Every step reports fifteen metrics, which is more than a run does: one in ten or a hundred.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import torch

from determined_ds.protocol.launches import Launch
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime.logs.identity import RunHere, shown_run
from determined_ds.runtime.logs.sender import TeamTools

STEP_S, WIDTH = 0.2, 512
PAIRS, BLOCK = 24, 12  # blocks of each kind, steps of a block
REST_S = 2.0
METRICS = {"loss": 1.0, **{f"metric_{number}": float(number) for number in range(14)}}


def products() -> int:
    """How many products take :data:`STEP_S`."""
    matrix = torch.ones(WIDTH, WIDTH)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < STEP_S:
        matrix @ matrix
        count += 1
    return count


def seconds_of_block(count: int, first: int, sink: TeamTools | None) -> float:
    """The mean step of a block, its reports included."""
    matrix = torch.ones(WIDTH, WIDTH)
    began = time.perf_counter()
    for step in range(first, first + BLOCK):
        for _ in range(count):
            matrix @ matrix
        if sink is not None:
            sink.report("training", step, METRICS)
    return (time.perf_counter() - began) / BLOCK


def processor_s(process: psutil.Process) -> float:
    """What a process and its children have taken of a processor."""
    all_of_them = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in all_of_them)


def measured(folder: Path) -> Iterator[str]:
    """The lines of the table."""
    tools = {
        "wandb": {"mode": "offline"},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "comet": {"online": False},
        "csv": {},
        "tensorboard": {},
    }
    about = partial(
        shown_run,
        run=RunHere(there=RunDir(folder)),
        exp_conf={},
        tools=tools,
        folder=folder,
        events=folder / "events",
    )
    sink = TeamTools(about, folder / "logging.log")
    began = time.perf_counter()
    sink.begin(Launch(time=time.time(), name="benchmark"))
    start_s = time.perf_counter() - began
    assert sink._process is not None
    process = psutil.Process(sink._process.pid)
    sink.report("training", 0, METRICS)
    while not all(
        (folder / name).exists() for name in ("metrics.csv", "mlflow.db", "wandb", "comet", "events")
    ):
        time.sleep(0.1)
    time.sleep(10)
    loading_s = processor_s(process)
    count, step, ratios, off_s = products(), 1, [], []
    for pair in range(PAIRS):
        seconds = {}
        for is_on in (True, False) if pair % 2 else (False, True):
            seconds[is_on] = seconds_of_block(count, step, sink if is_on else None)
            step += BLOCK
            time.sleep(REST_S)
        ratios.append(seconds[True] / seconds[False])
        off_s.append(seconds[False])
    began = time.perf_counter()
    for number in range(1000):
        sink.report("training", step + number, METRICS)
    report_s = (time.perf_counter() - began) / 1000
    time.sleep(10)
    taken_s = (processor_s(process) - loading_s) / (PAIRS * BLOCK + 1000)
    memory = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    sink.end("completed")
    low, high = statistics.quantiles(ratios, n=10)[::8]
    yield f"step without, ms | {statistics.median(off_s) * 1e3:.1f}"
    ratio = f"{statistics.median(ratios):.4f} ({low:.3f} to {high:.3f})"
    yield f"step with / without, median of {PAIRS} (deciles) | {ratio}"
    yield f"the training thread for a report, ms | {report_s * 1e3:.3f}"
    yield f"the process of the tools for a report, ms of a core | {taken_s * 1e3:.2f}"
    yield f"it starts: of the training thread, ms; of a core, s | {start_s * 1e3:.1f}; {loading_s:.1f}"
    yield f"its memory, MB | {memory / 1e6:.0f}"


def table() -> str:
    """As Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join(["| | |", "|---|---|", *(f"| {line} |" for line in measured(Path(folder)))])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
    print(f"\n{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
