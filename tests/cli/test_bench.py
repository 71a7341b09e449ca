"""``det-ds bench``, as its users start it: what it prints, what it leaves, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from determined_ds.protocol.machine_file import LOCATION, read_machine
from tests.command import det_ds
from tests.machines import Machine
from tests.ranks import free_port


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


@pytest.mark.long("under torchrun on one machine the place of a rank is found as in bench/test_plan.py")
def test_communication_between_two_machines(machines: tuple[Machine, Machine]) -> None:
    folder, port = machines[0].shared, free_port()
    options = ["--seconds", "2", "--largest", "16KiB", "--collectives", "all_reduce,send_recv"]
    started = []
    for number, machine in enumerate(machines):
        where = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", f"{number}"]
        where += ["--master_addr", machines[0].address, "--master_port", f"{port}"]
        rank = ["-m", "determined_ds.cli", "bench", "communication", *options, "--accelerator", "cpu"]
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *where,
            *rank,
            "--run-dir",
            str(folder / "run"),
        ]
        started.append(machine.start(words, env={LOCATION: str(folder / "machine.json")}))
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "all_reduce: 2 ranks on 2 machines, gloo, float32" in said[0]
    assert "all_reduce" not in said[1]  # rank 0 alone shows and keeps the figures
    kept = read_machine(folder / "machine.json")
    assert [(each.name, each.ranks, each.machines) for each in kept.collectives] == [
        ("all_reduce", 2, 2),
        ("send_recv", 2, 2),
    ]


@pytest.mark.long("test_communication shows the same as a table")
def test_as_json(tmp_path: Path, environment: dict[str, str]) -> None:
    options = ["--seconds", "1", "--largest", "1KiB", "--collectives", "broadcast", "--json"]
    done = det_ds("bench", "communication", *options, "--run-dir", tmp_path / "run", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "run" / "machine.json").read_text()
    [collective] = json.loads(done.stdout)["collectives"]
    assert (collective["name"], collective["ranks"]) == ("broadcast", 2)


@pytest.mark.parametrize(
    ("words", "field", "shown"),
    [
        (["memory", "--models", "1x64", "--strategies", "zero2"], "states", "1x64"),
        (["training", "--models", "1x64", "--micro-batches", "2"], "steps", "peak in fp32:"),
        (["checkpoint", "--model", "1x64", "--strategy", "zero3"], "checkpoints", "training stops"),
    ],
    ids=["memory", "training", "checkpoint"],
)
def test_other_kinds(
    words: list[str], field: str, shown: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = det_ds("bench", *words, "--seconds", "2", "--run-dir", tmp_path / "run", env=environment)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert shown in done.stdout
    kept = read_machine(tmp_path / "machine.json")
    assert len(getattr(kept, field)) == 1
    assert kept.measured[0].bench == words[0]
    assert (tmp_path / "run" / f"{words[0]}.png").is_file()
    assert not list(tmp_path.glob("run/**/checkpoints/*"))


@pytest.mark.long("runs as in test_other_kinds, of an experiment instead of the built-in model")
def test_an_experiment_at_several_points(tmp_path: Path, environment: dict[str, str]) -> None:
    config = ["--config", "experiments/gpt2/const.yaml", "--steps", "2"]
    vary = ["--vary", "hyperparameters.global_batch_size=4,8", "--set", "hyperparameters.sequence_length=32"]
    words = ["bench", "training", *config, *vary, "--run-dir", str(tmp_path / "run")]
    done = det_ds(*words, env=environment)
    assert done.returncode == 0, done.stderr
    kept = read_machine(tmp_path / "machine.json")
    assert [(each.model, each.samples, each.tokens_per_sample) for each in kept.steps] == [
        ("gpt2_const: global_batch_size=4", 4, 32),
        ("gpt2_const: global_batch_size=8", 8, 32),
    ]
    assert all(each.flops for each in kept.steps)
    assert kept.peaks


@pytest.mark.long("the storage of an experiment, as tests of --storage have it; here it is timed")
def test_checkpoint_storage_of_an_experiment(tmp_path: Path, environment: dict[str, str]) -> None:
    storage = f"checkpoint_storage={{type: directory, container_path: {tmp_path / 'stored'}}}"
    (tmp_path / "stored").mkdir()
    config = ["--config", "experiments/gpt2/const.yaml", "--set", storage, "--storage"]
    words = ["bench", "checkpoint", *config, "--seconds", "1", "--run-dir", str(tmp_path / "run")]
    done = det_ds(*words, env=environment)
    assert done.returncode == 0, done.stderr
    [figure] = read_machine(tmp_path / "machine.json").checkpoints
    assert (figure.storage, figure.copy_seconds) == ("directory", None)
    assert not list((tmp_path / "stored").iterdir())  # nothing is left of it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["communication", "--slots", "1"], "a single rank has no peer to communicate with"),
        (["communication", "--slots", "100000"], "--slots = 100000: this machine has"),
        (["communication", "--collectives", "gather"], "--collectives = 'gather': unknown name"),
        (["communication", "--largest", "many"], "--largest = 'many'"),
        (["memory", "--models", "big"], "--models = 'big': must be LAYERSxWIDTH"),
        (["memory", "--strategies", "zero4"], "--strategies = 'zero4': unknown name"),
        (["training", "--vary", "a=1"], "--vary: is for --config"),
        (["training", "--config", "x.yaml", "--models", "1x64"], "--models: has no effect beside --config"),
        (["checkpoint", "--storage"], "--storage: is for --config"),
        (["checkpoint", "--config", "missing.yaml"], "missing.yaml"),
        (
            ["training", "--config", "experiments/gpt2/const.yaml", "--vary", "a"],
            "--vary = 'a': must be KEY=VALUE",
        ),
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
