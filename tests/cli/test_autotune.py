"""``det-ds autotune`` as it is typed: a real tuning, interrupted and started again."""

from __future__ import annotations

import contextlib
import select
import signal
from pathlib import Path

import pytest
import yaml

from determined_ds import load_results
from tests.harness.command import TIMEOUT_S, Started, det_ds
from tests.rundir.runs import until

OWN = "as it is (zero1 micro 8)"
OPTIONS = ["--over", "zero_stage", "--steps", "5", "--warmup", "1", "--slots", "1"]
# ZeRO 0 reports another loss, and ZeRO 2 ends. The experiment has ZeRO 1; while the file is there, no other strategy
# ever ends its first batch.
ODD = """

class OddTrial(TinyTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        import pathlib, signal
        if self.resolved.zero_stage != 1 and (pathlib.Path(__file__).parent / "hold").exists():
            print("holding", flush=True)
            while True:
                signal.pause()
        if self.resolved.zero_stage == 2:
            raise ValueError("no such kernel")
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**found, "loss": 1.5 * found["loss"]} if self.resolved.zero_stage == 0 else found
"""


@pytest.fixture
def odd_model(own_model: Path) -> Path:
    """A context directory whose trial trains as it should under ZeRO 1 and 3 alone, and can be held."""
    with (own_model / "trial.py").open("a") as file:
        file.write(ODD)
    path = own_model / "experiment.yaml"
    path.write_text(path.read_text().replace("trial:TinyTrial", "trial:OddTrial"))
    return own_model


def test_interrupted_it_reports_and_never_selects_what_crashes_or_trains_otherwise(
    odd_model: Path, tmp_path: Path
) -> None:
    """Interrupted, it reports what it has measured; in the same folder, it begins anew."""
    run_dir = tmp_path / "tuned"
    words = ["autotune", str(odd_model / "experiment.yaml"), str(odd_model), *OPTIONS]
    words += ["--budget", "8", "--run-dir", str(run_dir)]
    (odd_model / "hold").touch()
    with contextlib.closing(Started(*words)) as process:
        logs = run_dir.glob
        until(
            lambda: (
                any("holding" in log.read_text() for log in logs("runs/*/1/output.log"))
                or process.poll() is not None
            )
        )
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, stderr
        assert not process.processes()
    assert f"best: {OWN}" in stdout
    assert [row.name for row in load_results(run_dir / "results.json").rows] == [OWN]

    (odd_model / "hold").unlink()
    done = det_ds(*words)
    assert done.returncode == 0, done.stderr
    results = load_results(run_dir / "results.json")
    rows = {row.zero_stage: row for row in results.rows}
    assert [rows[stage].status for stage in (1, 2, 0)] == ["measured", "failed", "failed"]
    assert rows[2].reason == "ValueError: no such kernel"
    assert rows[0].reason.startswith("rejected: its first loss is")
    assert "\nended: " in done.stdout
    [best] = [row for row in results.rows if f"best: {row.name}" in done.stdout]
    # What is claimed of it is no less than the measurements differ by.
    assert ("times as fast as the experiment as it was" in done.stdout) == (best.name != OWN)
    hyperparameters = yaml.safe_load((run_dir / "best.yaml").read_text())["hyperparameters"]
    stage = hyperparameters["deepspeed_config"]["val"]["zero_optimization"]["stage"]
    assert (stage, hyperparameters["global_batch_size"]) == (best.zero_stage, 8)
    assert stage in (1, 3)


def test_the_first_line_comes_before_the_model_is_loaded(own_model: Path, tmp_path: Path) -> None:
    """The trial's module waits as it is imported."""
    with (own_model / "trial.py").open("a") as file:
        file.write("\nimport signal\nsignal.pause()\n")
    words = ["autotune", str(own_model / "experiment.yaml"), str(own_model), *OPTIONS]
    with contextlib.closing(Started(*words, "--run-dir", str(tmp_path / "tuned"))) as process:
        assert select.select([process.stdout], [], [], TIMEOUT_S)[0]
        assert process.stdout.readline().startswith("tiny: autotune in ")
