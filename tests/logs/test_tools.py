"""W&B and MLflow show the same numbers at the same steps; a resumed run is one run; training waits for neither."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.own_runs import at
from tests.harness.command import ROOT, det_ds
from tests.interrupted.experiments import experiment
from tests.package import records

KEY = "0123456789abcdef0123456789abcdef01234567"
LOSS, VALIDATION = "training/loss", "validation/validation_loss"
Points = list[tuple[int, float]]  # a step, and the value of a metric there
BLOCK, HEADER = 2**15, 7  # of LevelDB's log format, which a file of Weights & Biases is


def wandb_runs(folder: Path) -> list[dict[str, Any]]:
    """Each start of an offline run, by the types that its client ships."""
    from wandb.proto import wandb_internal_pb2

    def items(found: Any) -> dict[str, Any]:
        return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in found}

    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run: dict[str, Any] = {"rows": [], "config": {}, "exit_code": None}
        content, at, whole = file.read_bytes(), HEADER, b""
        assert content.startswith(b":W&B")
        while at + HEADER <= len(content):
            if BLOCK - at % BLOCK < HEADER:
                at += BLOCK - at % BLOCK
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)
            at += HEADER + length
            whole += content[at - length : at]
            if kind not in (1, 4):  # whole, or the last part
                continue
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.HasField("run"):
                run |= {"id": record.run.run_id, "project": record.run.project, "tags": [*record.run.tags]}
                run["config"] |= items(record.run.config.update)
            elif record.HasField("config"):
                run["config"] |= items(record.config.update)
            elif record.HasField("history"):
                run["rows"].append(items(record.history.item))
            elif record.HasField("exit"):
                run["exit_code"] = record.exit.exit_code
        runs.append(run)
    return runs


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Any], list[int]]]:
    """MLflow's own server: its address, the metrics that it has taken, and its answers to the next batches of them."""
    folder, taken, answers = tmp_path_factory.mktemp("mlflow"), list[Any](), list[int]()
    os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(folder / "artifacts")
    from mlflow.server import app
    from werkzeug.serving import make_server

    def serve(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        metrics = json.loads(body).get("metrics") if environ["PATH_INFO"].endswith("log-batch") else None
        if metrics:
            status = answers.pop(0) if answers else 0
            if status != 503:
                taken.extend(metrics)
            if status:
                start_response(f"{status} of the test", [("Content-Length", "2")])
                return [b"{}"]
        return app(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}", taken, answers
    server.shutdown()
    thread.join()


def run(folder: Path, tools: dict[str, Any], *words: str, length: int = 9) -> Any:
    """``det-ds run`` of a trial that reports and validates, with its output."""
    config = experiment(zero=1)
    config["labels"] = ["one", "two"]
    config["resources"]["slots_per_trial"] = 1
    config["hyperparameters"]["logging"] = tools
    config["hyperparameters"]["fit"]["max_length"] = {"batches": length}
    config["hyperparameters"]["fit"]["reporting_period"] = {"batches": 1}
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    command = ("run", folder / "own.yaml", ROOT, "--run-dir", folder / "run", *words)
    done = det_ds(*command, env={"WANDB_API_KEY": KEY})
    assert done.returncode == 0, done.stderr
    return done


def test_a_resumed_run_is_one_run_whose_batches_are_its_steps(mlflow: Any, tmp_path: Path) -> None:
    """The second start goes on from a batch before the last of the first."""
    from mlflow.tracking import MlflowClient

    run_dir, (url, *_) = tmp_path / "run", mlflow
    tools = {"wandb": {"mode": "offline", "tags": ["mine"]}, "mlflow": {"tracking_uri": url}}

    def reported() -> dict[str, Points]:
        """As ``metrics.jsonl`` has it."""
        found = {}
        for group, _, name in (each.partition("/") for each in (LOSS, VALIDATION)):
            points = [(step, pytest.approx(each[name])) for step, each in records(run_dir, group)]
            found[f"{group}/{name}"] = points
        return found

    run(tmp_path, tools)
    first = reported()
    run(tmp_path, tools, "--resume", at(run_dir, 6).name, length=12)
    whole = reported()
    client = MlflowClient(url)
    [there] = client.search_runs([client.get_experiment_by_name("victim").experiment_id])
    for name in (LOSS, VALIDATION):
        again = [point for point in whole[name] if point[0] > 6]
        history = client.get_metric_history(there.info.run_id, name)
        assert [(point.step, point.value) for point in history] == first[name] + again
    assert there.info.status == "FINISHED"
    assert there.data.params["deepspeed.zero_optimization.stage"] == "1"

    before, after = wandb_runs(run_dir)
    assert before["id"] == after["id"]
    for started, points in ((before, first), (after, whole)):
        assert (started["project"], started["tags"]) == ("victim", ["one", "two", "mine"])
        assert started["config"]["deepspeed"]["zero_optimization"]["stage"] == 1
        assert started["exit_code"] == 0
        for name in (LOSS, VALIDATION):
            rows = [row for row in started["rows"] if name in row]
            assert all(row["batches"] == row["_step"] for row in rows)
            mine = [point for point in points[name] if started is before or point[0] > 6]
            assert [(row["batches"], row[name]) for row in rows] == mine
    for file in run_dir.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


SCRIPT = """
import threading, time
import determined as det

class Slow(dict):  # so that reports overlap
    def items(self):
        time.sleep(0.3)
        return super().items()

with det.core.init() as context:
    def report(number):
        context.train.report_metrics(f"thread{number}", 1, Slow(values=list(range(1500))))
    threads = [threading.Thread(target=report, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_overlapping_reports_that_a_server_fails_to_take_once_are_sent_once_each(
    mlflow: Any, tmp_path: Path
) -> None:
    """Each has more metrics than MLflow takes at once; the second of their batches is refused."""
    url, taken, answers = mlflow
    taken.clear()
    answers.extend((200, 503, *[200] * 20))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").write_text(SCRIPT)
    config = {
        "name": "threads",
        "entrypoint": "python3 train.py",
        "hyperparameters": {"logging": {"mlflow": {"tracking_uri": url}}},
        "searcher": {"name": "single", "metric": "loss"},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    done = det_ds("run", tmp_path / "own.yaml", tmp_path / "own", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    sent = sorted((metric["key"], metric["step"]) for metric in taken)
    names = [f"thread{number}/values/{index}" for number in range(2) for index in range(1500)]
    assert sent == sorted((name, 1) for name in names)


@pytest.mark.long("waits as long as the clients do; the numbers that they show are short")
def test_a_server_that_takes_nothing_is_warned_of_and_costs_no_training(tmp_path: Path) -> None:
    """One that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        done = run(tmp_path, {"mlflow": {"tracking_uri": f"http://127.0.0.1:{server.getsockname()[1]}"}})
    took_s = time.time() - (tmp_path / "run" / "metrics.jsonl").stat().st_mtime
    assert took_s < 45, "the end waits 30 s at most"
    assert [step for step, _ in records(tmp_path / "run", "training")] == list(range(1, 10))
    assert "MLflow has not taken" in done.stderr + done.stdout
