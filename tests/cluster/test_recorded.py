"""Our master answers as a real one did: the recorded exchange of trials with Determined 0.38.1, sent to it again.

See ``recorded/README.md``. Each request is to be answered with the recorded status, by recorded keys with values of the
same types, and by the same value where it decides what a trial does (:data:`SAME`).
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
from tests.cluster.master import Master, ask, create, still_master
from tests.cluster.state import Experiment

RECORDED = Path(__file__).with_name("recorded")
# By them the searchers' decisions and the preemption of the two masters are compared.
SAME = {"state", "preempt", "restarts", "totalBatchesProcessed", "checkpointCount", "metric"}
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
                path_asked = replay.ours(row)["path"].split("?")[0]
                asked = (path_asked, {"timeout_seconds": ["60"]})
                while not any((call.path, call.query) == asked for call in master.server.calls):
                    time.sleep(0.005)
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
            found = self._master.allocation(self.ours(event)["allocation"])
            self._master.exited(*found, event["code"])
        else:
            ask(self._master, "POST", f"/api/v1/experiments/{self._experiment.id}/{kind}")

    def send(self, row: Json) -> requests.Response:
        """Send a recorded request, with the token of the trial that it is of; of none, with the user's."""
        named = re.search(r"\{(?:trial|task|container) (\d+)", json.dumps(row))
        running = self._experiment.trials[int(named[1]) - 1].running if named else None
        token = {"token": running.token} if running else {}
        ours = self.ours(row)
        return ask(self._master, ours["method"], ours["path"], ours["request"], **token)

    def ours(self, row: Json) -> Json:
        """A row with our ids in the place of names; that of a trial is a number where it stands alone."""
        text = re.sub(r'"(\{trial \d+\})"', r"\1", json.dumps(row))
        return json.loads(re.sub(r"\{(\w+)(?: (\d+)(?:\.(\d+))?)?\}", self._id_of, text))

    def _id_of(self, name: re.Match[str]) -> str:
        kind, trial, run = name.groups()
        if kind == "experiment":
            return str(self._experiment.id)
        found = self._experiment.trials[int(trial) - 1]
        if kind == "container":
            return found.allocations[int(run) - 1].container
        return found.task_id if kind == "task" else str(found.id)


def differences(recorded: Json, ours: Json, at: str = "answer") -> list[str]:
    """Where our answer differs: in types, in values of :data:`SAME` or their lack, or by a key of its own."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        found = [f"{at}.{key}: ours lacks it" for key in (recorded.keys() & SAME) - ours.keys()]
        for key in ours:
            inner = f"{at}.{key}"
            if key in recorded:
                found += differences(recorded[key], ours[key], inner)
            else:
                found.append(f"{inner}: only ours has it")
        return found
    if isinstance(recorded, list) and isinstance(ours, list):
        pairs = zip(recorded[:1], ours[:1], strict=False)
        return [line for pair in pairs for line in differences(*pair, f"{at}[0]")]
    kinds = {int: float}  # as JSON has it: 1 and 1.0 are alike
    types = [kinds.get(type(value), type(value)) for value in (recorded, ours)]
    if types[0] != types[1] or (at.rsplit(".", 1)[-1] in SAME and recorded != ours):
        return [f"{at}: {recorded!r} recorded, {ours!r} ours"]
    return []
