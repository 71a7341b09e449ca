"""``det-ds compare`` as it is typed: what it writes and says, and what it refuses before anything starts."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds import ConfigError, compare, load_results
from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import det_ds

FILES = ("report.html", "results.json", "results.csv")
# ZeRO 3 finds no memory, once it trains.
GREEDY = """

class GreedyTrial(TinyTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if self.resolved.zero_stage == 3:
            raise MemoryError("no room for it")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
"""


def greedy(folder: Path) -> Path:
    """The experiment of a context directory, with a trial that needs more memory than there is under ZeRO 3."""
    with (folder / "trial.py").open("a") as file:
        file.write(GREEDY)
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("trial:TinyTrial", "trial:GreedyTrial"))
    return path


def invoked(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["compare", *map(str, words), "--accelerator", "cpu"])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


# ------------------------------------------------------------------------------------------------- a report


def test_a_report_of_what_runs_and_what_does_not(own_model: Path, tmp_path: Path) -> None:
    """One is measured, one runs out of memory, one cannot run; the next time, what was measured is taken as it is."""
    config, run_dir = greedy(own_model), tmp_path / "compared"
    options = ["--slots", "1", "--steps", "3", "--warmup", "1", "--repeat", "1", "--run-dir", run_dir]
    done = det_ds("compare", config, own_model, "--strategies", "zero0,zero3,zeropp", *options)
    assert done.returncode == 0, done.stderr
    results = load_results(run_dir / "results.json")
    assert [(row.name, row.status) for row in results.rows] == [
        ("zero0", "measured"),
        ("zero3", "out of memory"),
        ("zeropp", "cannot run"),
    ]
    measured, greedy_one, impossible = results.rows
    assert (measured.num_steps, len(measured.losses), measured.slots) == (3, 4, 1)
    assert greedy_one.reason == "MemoryError: no room for it"
    assert "there is no CUDA device" in impossible.reason
    # AdamW on four weights and a bias, in fp32: parameters, gradients and two moments.
    assert measured.model_state_bytes == measured.estimated_model_state_bytes == 16 * 5
    assert measured.parts is not None
    assert sum(measured.parts.values()) == pytest.approx(1)
    assert {"forward", "backward", "optimizer"} <= set(measured.parts)
    assert "shares of a step" in done.stdout
    assert not re.search(r"\b0\.0 samples/s", done.stdout)
    for told in ("1/1  zero0 x1", "out of memory: MemoryError: no room for it", "cannot run: ", *FILES):
        assert told in done.stdout

    with (run_dir / "results.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["zero0", "zero3", "zeropp"]
    page = (run_dir / "report.html").read_text()
    assert "MemoryError: no room for it" in page

    record = run_dir / "runs" / "zero0-x1" / "1" / "metrics.jsonl"
    before = record.stat().st_mtime_ns
    code, output = invoked(config, own_model, "--strategies", "zero0,zeropp", *options)
    assert code == 0, output
    assert record.stat().st_mtime_ns == before
    assert "zero0 x1: measured before" in output
    assert load_results(run_dir / "results.json").rows[0].repetitions == measured.repetitions
    with (own_model / "trial.py").open("a") as file:
        file.write("# other code, which may take another time\n")
    done = det_ds("compare", config, own_model, "--strategies", "zero0", *options)
    assert done.returncode == 0, done.stderr
    assert "measured before" not in done.stdout
    assert record.stat().st_mtime_ns > before


def test_where_nothing_can_be_measured_it_fails(own_model: Path, tmp_path: Path) -> None:
    """With a report, all the same."""
    code, output = invoked(
        *(
            own_model / "experiment.yaml",
            own_model,
            "--strategies",
            "zeropp,pipeline",
            "--run-dir",
            tmp_path / "run",
        )
    )
    assert code == 1
    assert "error: none of the strategies could be measured" in output
    results = load_results(tmp_path / "run" / "results.json")
    assert [row.status for row in results.rows] == ["cannot run", "cannot run"]
    assert "TinyTrial has no stages" in results.rows[1].reason


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--strategies", "zero1,zer2"], ["--strategies = 'zer2': unknown name", "did you mean zero2?"]),
        ([], ["Missing option '--strategies'"]),
        (
            ["--strategies", "zero0", "--slots", "two"],
            ["'two' is not a list of numbers above 0, such as 1,2"],
        ),
        (["--strategies", "zero0", "--slots", "1,0"], ["is not a list of numbers above 0"]),
        (["--strategies", "zero0", "--steps", "0"], ["'--steps'"]),
        (
            ["--strategies", "zero0", "--set", "hyperparameters.global_batch_size=7"],
            ["hyperparameters.global_batch_size = 7", "is not a multiple of"],
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    options: list[str], says: list[str], own_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    code, output = invoked(own_model / "experiment.yaml", own_model, *options, "--run-dir", run_dir)
    assert code == EXIT_CONFIG
    for words in says:
        assert words in output
    assert not run_dir.exists()


def test_all_that_is_wrong_is_told_at_once(own_model: Path, tmp_path: Path) -> None:
    code, output = invoked(tmp_path / "missing.yaml", own_model, "--strategies", "zero9,zer1")
    assert code == EXIT_CONFIG
    assert output.count("error: ") == 3
    assert "missing.yaml" in output


def test_numbers_that_make_no_sense_are_all_reported(own_model: Path) -> None:
    config = own_model / "experiment.yaml"
    with pytest.raises(ConfigError) as caught:
        compare(config, own_model, strategies=["zero0"], steps=0, repeat=0, slots=[2, -1])
    assert [problem.key for problem in caught.value.problems] == ["steps", "repeat", "slots -1"]
