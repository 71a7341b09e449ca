"""What W&B and MLflow have of a run, by their own formats and clients."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A step, and the value of a metric there.
Points = list[tuple[int, float]]

BLOCK, HEADER = 2**15, 7  # of LevelDB's log format, which a file of Weights & Biases is


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a ``run-ID.wandb``. Its client ships their types, and no reader of the file in Python."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = file.read_bytes(), HEADER, b""
    assert content.startswith(b":W&B")
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        at += HEADER
        record += content[at : at + length]
        at += length
        if kind in (1, 4):  # whole, or the last part
            read = wandb_internal_pb2.Record()
            read.ParseFromString(record)
            record = b""
            yield read


def wandb_runs(folder: Path) -> list[dict[str, Any]]:
    """Each start of an offline run: ``id``, ``project``, ``tags``, ``config``, ``rows``, ``summary``, ``exit_code``."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run: dict[str, Any] = {"rows": [], "config": {}, "summary": {}, "exit_code": None}
        for record in wandb_records(file):
            if record.HasField("run"):
                run |= {"id": record.run.run_id, "project": record.run.project, "tags": [*record.run.tags]}
                run["config"] |= _items(record.run.config.update)
            elif record.HasField("config"):
                run["config"] |= _items(record.config.update)
            elif record.HasField("history"):
                run["rows"].append(_items(record.history.item))
            elif record.HasField("summary"):
                run["summary"] |= _items(record.summary.update)
            elif record.HasField("exit"):
                run["exit_code"] = record.exit.exit_code
        found.append(run)
    return found


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def points_of(rows: list[dict[str, Any]], name: str, step: str) -> Points:
    """A metric of rows."""
    return [(int(row[step]), float(row[name])) for row in rows if row.get(name) not in (None, "")]


@contextlib.contextmanager
def serving_mlflow(folder: Path, taken: list[Any], answers: list[int]) -> Iterator[str]:
    """MLflow's own server, on loopback. Yields its url.

    Args:
        folder: Of its files.
        taken: Gets each metric that it has taken, as it was sent.
        answers: To the next batches of metrics, which are not stored; those after them are.
    """
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
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()


def mlflow_runs(uri: str, experiment: str) -> tuple[Any, list[Any]]:
    """The client, and the runs of an experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return client, list(client.search_runs([found.experiment_id]))


def mlflow_points(client: Any, run: Any, name: str) -> Points:
    """A metric there, in the order of logging."""
    history = client.get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in history]
