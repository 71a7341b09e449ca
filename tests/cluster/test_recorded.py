"""Our master answers as a real one did: the recorded exchange of trials with Determined 0.38.1, sent to it again.

See ``recorded/README.md``. Each request is to be answered with the recorded status, by the same keys with values of the
same types; and where the answer decides what a trial does (:data:`SAME`), by the same value.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.cluster.http import Json
from tests.cluster.master import Master
from tests.cluster.state import Experiment
from tests.cluster.still import ask, create, still_master

RECORDED = Path(__file__).with_name("recorded")
# By them the searchers' decisions and the preemption of the two masters are compared.
SAME = ("state", "preempt", "restarts", "totalBatchesProcessed", "checkpointCount", "metric")
LONG_POLL = "/signals/preemption?timeout_seconds=60"


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_exchange_is_answered_as_it_was(path: Path) -> None:
    found, waiting = [], []

    def compare(line: int, row: Json, answer: requests.Response) -> None:
        if answer.status_code != row["status"]:
            found.append(f"line {line}: {row['status']} recorded, {answer.status_code} ours: {answer.text}")
        else:
            found.extend(f"line {line}: {text}" for text in differences(row["response"], answer.json()))

    with still_master() as master, ThreadPoolExecutor() as pool:
        replay = Replay(master)
        for line, row in enumerate(map(json.loads, path.read_text().splitlines()), start=1):
            if "event" in row:
                replay.happen(row)
            elif row["path"].endswith(LONG_POLL):
                waiting.append((line, row, pool.submit(replay.send, row)))
                replay.wait_until_asked(row)
            else:
                compare(line, row, replay.send(row))
        for line, row, poll in waiting:
            compare(line, row, poll.result())
    assert not found, "\n".join(found)


class Replay:
    """A recorded scenario, sent to a master of ours; the names in it stand for ids, which are the master's own."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._experiment: Experiment

    def happen(self, event: Json) -> None:
        """What happened on the real cluster between two requests."""
        kind = event["event"]
        if kind == "create":
            self._experiment = create(self._master, event["config"])
        elif kind == "exit":
            found = self._master.allocation(self._ours(event)["allocation"])
            self._master.exited(*found, event["code"])
        else:
            ask(self._master, "POST", f"/api/v1/experiments/{self._experiment.id}/{kind}")

    def send(self, row: Json) -> requests.Response:
        """Send a recorded request, with the token of the trial that it is of; of none, with the user's."""
        named = re.search(r"\{(?:trial|task|container) (\d+)", json.dumps(row))
        running = self._experiment.trials[int(named[1]) - 1].running if named else None
        token = {"token": running.token} if running else {}
        ours = self._ours(row)
        return ask(self._master, ours["method"], ours["path"], ours["request"], **token)

    def wait_until_asked(self, row: Json) -> None:
        """Wait until the master has a long poll, which it answers later."""
        path, _ = self._ours(row)["path"].split("?")
        asked = {"timeout_seconds": ["60"]}
        while not any(call.path == path and call.query == asked for call in self._master.server.calls):
            time.sleep(0.005)

    def _ours(self, row: Json) -> Json:
        """A row with our ids in the place of names; that of a trial is a number where it stands alone."""
        text = re.sub(r'"(\{trial \d+\})"', r"\1", json.dumps(row))
        return json.loads(re.sub(r"\{(\w+)(?: (\d+)(?:\.(\d+))?)?\}", self._id_of, text))

    def _id_of(self, name: re.Match[str]) -> str:
        kind, trial, run = name.groups()
        if kind == "experiment":
            return str(self._experiment.id)
        found = self._experiment.trials[int(trial) - 1]
        if kind == "container":
            return found.allocations[int(run) - 1].resources[0]
        return found.task_id if kind == "task" else str(found.id)


def differences(recorded: Json, ours: Json, at: str = "answer") -> list[str]:
    """Where two answers differ: in keys, types, or the values of :data:`SAME`."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        found = [f"{at}.{key}: ours lacks it" for key in recorded.keys() - ours.keys()]
        found += [f"{at}.{key}: only ours has it" for key in ours.keys() - recorded.keys()]
        for key in recorded.keys() & ours.keys():
            found += differences(recorded[key], ours[key], f"{at}.{key}")
        return found
    if isinstance(recorded, list) and isinstance(ours, list):
        pairs = zip(recorded[:1], ours[:1], strict=False)
        return [line for pair in pairs for line in differences(*pair, f"{at}[0]")]
    key = at.rsplit(".", 1)[-1]
    if type_of(recorded) != type_of(ours) or (key in SAME and recorded != ours):
        return [f"{at}: {recorded!r} recorded, {ours!r} ours"]
    return []


def type_of(value: Json) -> str:
    """As JSON has it: 1 and 1.0 are alike."""
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )
