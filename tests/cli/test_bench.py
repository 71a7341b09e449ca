"""``det-ds bench``, as its users start it: what it prints, what it leaves, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from determined_ds.protocol.machine_file import LOCATION, read_machine
from tests.command import det_ds


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {LOCATION: str(tmp_path / "machine.json")}


def test_communication(tmp_path: Path, environment: dict[str, str]) -> None:
    options = ["--seconds", "1", "--largest", "4KiB", "--collectives", "all_reduce,send_recv"]
    done = det_ds("bench", "communication", *options, "--run-dir", tmp_path / "run", env=environment)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "all_reduce: 2 ranks on 1 machine, gloo, float32" in done.stdout
    assert "about 1 s after the start" in done.stderr
    kept = read_machine(tmp_path / "machine.json")
    assert [each.name for each in kept.collectives] == ["all_reduce", "send_recv"]
    assert read_machine(tmp_path / "run" / "machine.json") == kept
    assert (tmp_path / "run" / "communication.png").is_file()


@pytest.mark.long("test_communication shows the same as a table")
def test_as_json(tmp_path: Path, environment: dict[str, str]) -> None:
    options = ["--seconds", "1", "--largest", "1KiB", "--collectives", "broadcast", "--json"]
    done = det_ds("bench", "communication", *options, "--run-dir", tmp_path / "run", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "run" / "machine.json").read_text()
    [collective] = json.loads(done.stdout)["collectives"]
    assert (collective["name"], collective["ranks"]) == ("broadcast", 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["communication", "--slots", "1"], "a single rank has no peer to communicate with"),
        (["communication", "--slots", "100000"], "--slots = 100000: this machine has"),
        (["communication", "--collectives", "gather"], "--collectives = 'gather': unknown name"),
        (["communication", "--largest", "many"], "--largest = 'many'"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = det_ds("bench", *words, "--run-dir", tmp_path / "run", env=environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
