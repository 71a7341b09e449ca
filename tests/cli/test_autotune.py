"""``det-ds autotune`` as it is typed: a real tuning, interrupted and gone on with; and what it refuses."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from determined_ds import load_results
from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import TIMEOUT_S, Started, det_ds

FILES = {"best.yaml", "report.html", "results.json", "results.csv"}
OWN = "as it is (zero1 micro 8)"
# While the file is there, every other strategy than the experiment's never ends its first batch.
HOLDING = """

class HoldingTrial(TinyTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        import pathlib, signal
        if self.resolved.zero_stage != 1 and (pathlib.Path(__file__).parent / "hold").exists():
            print("holding", flush=True)
            while True:
                signal.pause()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
"""


@pytest.fixture
def holding(own_model: Path) -> Path:
    """A context directory whose trial can be held."""
    with (own_model / "trial.py").open("a") as file:
        file.write(HOLDING)
    path = own_model / "experiment.yaml"
    path.write_text(path.read_text().replace("trial:TinyTrial", "trial:HoldingTrial"))
    return own_model


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Commands under way; none outlives the test."""
    processes: list[Started] = []
    yield processes
    for process in processes:
        process.close()


def words_for(folder: Path, run_dir: Path) -> list[str]:
    options = ["--budget", "2", "--over", "zero_stage", "--steps", "5", "--warmup", "1", "--slots", "1"]
    return ["autotune", str(folder / "experiment.yaml"), str(folder), *options, "--run-dir", str(run_dir)]


def invoked(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["autotune", *map(str, words)])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


# ------------------------------------------------------------------------------------------- a real tuning


def test_interrupted_it_reports_what_was_found_and_goes_on(
    holding: Path, tmp_path: Path, started: list[Started]
) -> None:
    """What was measured before is not measured again; what was interrupted is."""
    run_dir, words = tmp_path / "tuned", words_for(holding, tmp_path / "tuned")
    (holding / "hold").write_text("")
    process = Started(*words)
    started.append(process)
    deadline = time.monotonic() + TIMEOUT_S
    while not any("holding" in log.read_text() for log in run_dir.glob("runs/*/1/output.log")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(process.processes()) >= 3
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stderr
    assert not process.processes()
    assert "SIGINT: ending the measurement; the best so far is written; again ends at once" in stderr
    assert f"interrupted; to resume: the same command with --run-dir {run_dir}" in stderr
    assert f"best: {OWN}" in stdout
    assert {path.name for path in run_dir.iterdir()} >= FILES
    assert [row.name for row in load_results(run_dir / "results.json").rows] == [OWN]

    (holding / "hold").unlink()
    own = run_dir / "runs" / OWN.replace(" ", "-") / "1" / "metrics.jsonl"
    before = own.stat().st_mtime_ns
    done = det_ds(*words)
    assert done.returncode == 0, done.stderr
    assert own.stat().st_mtime_ns == before
    results = load_results(run_dir / "results.json")
    # As few steps as these are all measured, however slow: no run is beaten before it has run so many.
    assert [row.status for row in results.rows] == ["measured", "measured"]
    assert results.rows[0].name == OWN
    assert f"{OWN}: measured before" in done.stdout
    assert "ended: the budget" in done.stdout
    [best] = [row for row in results.rows if f"best: {row.name}" in done.stdout]
    # What is claimed of it is no less than the measurements differ by.
    nothing = "nothing that was tried is faster than the experiment as it was by more than repetitions differ"
    assert (nothing in done.stdout) == (best.name == OWN)
    assert ("times as fast as the experiment as it was" in done.stdout) == (best.name != OWN)
    assert "tiny: the fastest way to train it on 1 slots, global batch 8" in done.stdout
    data = yaml.safe_load((run_dir / "best.yaml").read_text())
    stage = data["hyperparameters"]["deepspeed_config"]["val"]["zero_optimization"]["stage"]
    assert stage == best.zero_stage
    assert data["hyperparameters"]["global_batch_size"] == 8


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--over", "zero_stge"],
            ["--over = 'zero_stge': unknown name", "did you mean zero_stage?"],
        ),
        (["--metric", "sample_per_second"], ["did you mean samples_per_second?"]),
        (["--budget", "soon"], ["--budget = 'soon': must be a time or a number of trials"]),
        (
            ["--metric", "tokens_per_second"],
            ["trial:TinyTrial does not say how many tokens", "tokens_per_sample"],
        ),
        (["--steps", "4"], ["'--steps'"]),
        (["--loss-tolerance", "0"], ["'--loss-tolerance'"]),
        (["--slots", "3"], ["hyperparameters.global_batch_size = 8", "is not a multiple of"]),
        (
            ["--set", "entrypoint=python3 -m determined_ds.train trial:TinyTrail"],
            ["TinyTrail", "TinyTrial"],
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    options: list[str], says: list[str], own_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [own_model / "experiment.yaml", own_model, *options, "--run-dir", run_dir, "--accelerator", "cpu"]
    code, output = invoked(*words)
    assert code == EXIT_CONFIG
    for sentence in says:
        assert sentence in output
    assert not run_dir.exists()
