"""``det-ds watch`` follows a run of another process by its files, and ends with what came of it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.report.recorded import launch, line, recorded, training, validation

RESUME = "det-ds run runs/gpt2/experiment.yaml . --run-dir runs/gpt2 --resume"  # where it was trained
CONFIG = {
    "name": "followed",
    "searcher": {"name": "single", "metric": "validation_loss"},
    "hyperparameters": {"fit": {"max_length": {"batches": 40}}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run", [training(10, loss=4.0)], config=CONFIG)


def watch(path: Path, **environment: str) -> str:
    done = CliRunner().invoke(main, ["watch", str(path)], env=environment)
    assert done.exit_code == 0, done.output
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)


def report(path: Path, *records: dict[str, object]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(map(line, records))


@pytest.fixture
def held(run: Path) -> int:
    """The run is under way: its lock is held, by a descriptor of this process."""
    lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(lock, f"{os.getpid()} {socket.gethostname()}\n".encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_a_run_that_trains_is_followed_to_its_end_and_from_a_checkpoint_that_it_returns_to(
    run: Path, held: int
) -> None:
    def train() -> None:
        time.sleep(0.3)
        report(run, training(20, loss=3.0), validation(20, validation_loss=2.5))
        time.sleep(1.0)
        (run / "new").write_text(line(training(10, loss=4.0)) + line(training(12, loss=3.5)))
        (run / "new").replace(run / "metrics.jsonl")  # as a resume does
        time.sleep(1.0)
        os.close(held)

    writer = threading.Thread(target=train)
    writer.start()
    said = watch(run)
    writer.join()
    for told in ("batch 10/40", "batch 20/40", "validation_loss 2.5", "batch 12/40"):
        assert told in said
    assert "followed: ended, 12 of 40 batches" in said


def test_the_panel_shows_a_run_that_starts_and_keeps_its_curve_at_a_late_report(run: Path, held: int) -> None:
    reported = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").unlink()

    def train() -> None:
        time.sleep(0.7)
        (run / "metrics.jsonl").write_text(reported)
        report(run, training(20, loss=3.0))
        time.sleep(0.7)
        report(run, validation(10, validation_loss=2.5))  # of an earlier batch
        time.sleep(0.7)
        os.close(held)

    writer = threading.Thread(target=train)
    writer.start()
    said = watch(run, FORCE_COLOR="1", TERM="xterm", COLUMNS="80")
    writer.join()
    assert "it loads its code" in said
    *_, panel = said.split("ended  ")
    assert "batch 20/40" in panel
    assert "from 4" in panel


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "run", [training(40, loss=4.0)], config=CONFIG, checkpoints=[20, 40])
    is_dir = Path.is_dir

    def pruned(self: Path, **how: bool) -> bool:
        found = is_dir(self, **how)
        if self.name == "uuid-20":
            shutil.rmtree(self, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "is_dir", pruned)
    assert "batch 40, uuid-40" in watch(path)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (
            {"status": "completed", "steps_completed": 40, "continued_by": RESUME},
            ["completed, 40 of 40", "longer      {resume} --set hyperparameters.fit.max_length.batches=80"],
        ),
        (
            {"status": "failed", "cause": "error", "reason": "loss is nan"},
            ["failed, 40", "error: loss is nan"],
        ),
        (None, ["ended, 40 of 40", "resume      {resume}\n"]),  # it was killed
    ],
)
def test_a_run_that_has_ended_is_shown_once_with_commands_to_continue(
    result: dict[str, object] | None, told: list[str], tmp_path: Path
) -> None:
    records = [training(20, loss=4.5), validation(20, validation_loss=2.25)]
    records += [training(40, loss=2.0), validation(40, validation_loss=2.5)]
    how = {"config": CONFIG, "result": result, "checkpoints": [40], "launches": [launch(resume=RESUME)]}
    path = recorded(tmp_path / "run", records, **how)
    said, here = watch(path), f"det-ds run {path}/experiment.yaml . --run-dir {path} --resume"
    for words in ("validation_loss 2.25 at batch 20, the best; 2.5 at batch 40", *told):
        assert words.format(resume=here) in said


def test_a_strategy_that_the_code_decides_is_that_of_its_engine(tmp_path: Path) -> None:
    """As of a script of transformers with a DeepSpeed configuration of its own."""
    launches = [launch(strategy="", ds_config={}, global_batch_size=0)]
    path = recorded(tmp_path / "run", [training(40, loss=2.0)], config=CONFIG, launches=launches)
    (path / "deepspeed_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert "strategy    2 slots (CPU), ZeRO 2, fp32\n" in watch(path)
