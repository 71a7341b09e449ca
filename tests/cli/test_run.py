"""The run directory, going on with a run, and what a failure looks like: real runs of a tiny model."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from determined_ds.experiment.experiment import load_experiment
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.protocol.checkpoint_files import (
    checkpoints_in,
    files_of,
    fingerprint,
    write_manifest,
)
from determined_ds.protocol.conclusion import read_result
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.tensor_index import INDEX_NAME
from tests.cli.conftest import OWN_MODEL
from tests.command import det_ds, det_ds_program
from tests.report.making import SHARED_OUT

BATCHES = "hyperparameters.fit.max_length.batches"
# What is promised: a rank that dies takes its run down within this many seconds.
END_S = 30.0


def prepared(context: Path, run_dir: Path | None, *overrides: str, resume: bool = False) -> LocalRun:
    options = RunOptions(
        config=context / "experiment.yaml",
        context_dir=context,
        overrides=overrides,
        run_dir=run_dir,
        resume="last" if resume else None,
        accelerator="cpu",
    )
    return prepare_run(options, now=datetime(2026, 1, 1))


# --------------------------------------------------------------------- a run, and going on with it


class Run:
    """Four batches by two ranks; then, from the checkpoint at the second batch, on to the sixth."""

    def __init__(self, folder: Path) -> None:
        self.context = folder / "own_model"
        self.run_dir = folder / "run"
        shutil.copytree(OWN_MODEL, self.context)
        self.ds_config = prepared(self.context, self.run_dir, f"{BATCHES}=4").resolved.ds_config
        self.first = det_ds_program(
            *("run", self.context / "experiment.yaml", self.context),
            *("--set", f"{BATCHES}=4", "--run-dir", self.run_dir),
        )
        assert self.first.returncode == 0, self.first.stderr
        self.kept = folder / "kept"
        shutil.copytree(self.run_dir, self.kept)

        # As if the run had been killed before its last checkpoint.
        newest = max(self.checkpoints(), key=self.steps_of)
        assert self.steps_of(newest) == 4
        shutil.rmtree(newest)
        self.second = det_ds(
            *("run", self.run_dir / "experiment.yaml", self.context),
            *("--set", f"{BATCHES}=6", "--run-dir", self.run_dir, "--resume"),
        )
        assert self.second.returncode == 0, self.second.stderr

    def checkpoints(self) -> list[Path]:
        return [path.parent for path in (self.run_dir / "checkpoints").glob("*/metadata.json")]

    @staticmethod
    def steps_of(checkpoint: Path) -> int:
        return int(json.loads((checkpoint / "metadata.json").read_text())["steps_completed"])


def metrics_in(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def series(run_dir: Path, group: str, name: str) -> dict[int, float]:
    return {r["steps_completed"]: r["metrics"][name] for r in metrics_in(run_dir) if r["group"] == group}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def test_metrics_are_one_object_a_line(run: Run) -> None:
    records = metrics_in(run.kept)
    for record in records:
        assert record["group"] in ("training", "validation")
        assert isinstance(record["steps_completed"], int)
        assert isinstance(record["metrics"]["batches"], int)
    assert list(series(run.kept, "training", "loss")) == [1, 2, 3, 4]
    assert list(series(run.kept, "validation", "validation_loss")) == [2, 4]


def test_what_deepspeed_was_given_is_what_was_decided(run: Run) -> None:
    given = json.loads((run.kept / "deepspeed_config.json").read_text())
    assert given == run.ds_config
    assert given["train_batch_size"] == 8
    assert given["train_micro_batch_size_per_gpu"] == 4
    assert "auto" not in json.dumps(given)


def test_the_trials_seed_is_that_of_a_masters_first_trial(run: Run) -> None:
    """Seen on a master: 441365315 for experiment_seed 0, which is what a run takes that states none."""
    said = "  seed       441365315, of experiment_seed 0: none is given, and a master would take the time\n"
    assert said in run.first.stdout
    for checkpoint in run.checkpoints():
        assert json.loads((checkpoint / "load_data.json").read_text())["trial_seed"] == 441365315


def test_the_result_says_how_it_ended(run: Run) -> None:
    validations = series(run.run_dir, "validation", "validation_loss")
    best = min(validations, key=validations.__getitem__)
    uuids = {run.steps_of(path): path.name for path in run.checkpoints()}
    assert json.loads((run.run_dir / "result.json").read_text()) == {
        "status": "completed",
        "cause": None,
        "reason": None,
        "steps_completed": 6,
        "trial_seed": 441365315,
        "best": {
            "metric": "validation_loss",
            "value": validations[best],
            "steps_completed": best,
            "checkpoint": uuids[best],
        },
        "checkpoint": {"uuid": uuids[6], "steps_completed": 6},
        "resume": None,
        "continued_by": json.loads((run.run_dir / "result.json").read_text())["continued_by"],
        "deleted": [],
        "slots": 2,
    }


def test_a_run_keeps_the_seed_that_it_was_begun_with(run: Run, tmp_path: Path) -> None:
    """Of one whose checkpoints name none, or 0: the experiment's own, 0. Its data keep their order."""
    older = tmp_path / "older"
    shutil.copytree(run.kept, older)
    for seed in ({}, {"trial_seed": 0}):
        for checkpoint in checkpoints_in(older / "checkpoints"):
            told = json.loads((checkpoint.path / "load_data.json").read_text())
            told.pop("trial_seed", None)
            (checkpoint.path / "load_data.json").write_text(json.dumps(told | seed))
            metadata = json.loads((checkpoint.path / "metadata.json").read_text())
            files = {name: fingerprint(checkpoint.path / name) for name in files_of(checkpoint.path)}
            write_manifest(checkpoint.path, files, metadata)
        resumed = prepared(run.context, older, f"{BATCHES}=5", resume=True).experiment
        assert resumed.trial_seed == resumed.hyperparameters.data["trial_seed"] == 0
    named = prepared(run.context, run.run_dir, f"{BATCHES}=7", resume=True).experiment
    assert named.trial_seed == 441365315


def test_resume_goes_on_from_the_newest_checkpoint(run: Run) -> None:
    assert "resume     batch 2, checkpoint" in run.second.stdout
    assert "batch 3/6" in run.second.stdout
    assert "batch 2/6  loss" not in run.second.stdout


def test_after_resuming_every_step_is_there_once(run: Run) -> None:
    seen = Counter((record["group"], record["steps_completed"]) for record in metrics_in(run.run_dir))
    expected = [("training", step) for step in range(1, 7)] + [("validation", step) for step in (2, 4, 6)]
    assert seen == Counter(expected)


def test_without_a_terminal_there_are_plain_lines(run: Run) -> None:
    assert not {"\x1b", "\r"} & set(run.first.stdout)
    lines = run.first.stdout.splitlines()
    assert lines[0] == "tiny: trial:TinyTrial"
    assert any(line.startswith("training    batch 1/4  loss ") for line in lines)
    assert any(line.startswith("validation  batch 2/4  validation_loss ") for line in lines)


def test_a_run_that_is_well_says_nothing_on_stderr(run: Run) -> None:
    assert run.first.stderr == ""


# --------------------------------------------------------------------- a rank that fails


def test_a_rank_that_raises_is_named_and_the_other_ends(own_model: Path) -> None:
    file = own_model / "trial.py"
    text = file.read_text()
    place = "        inputs_B4, targets_B1 = batch\n"
    assert text.count(place) == 1
    fails = (
        "        if self.context.distributed.rank == 1:\n"
        "            import pathlib, time\n"
        f"            pathlib.Path({str(own_model / 'failed_at')!r}).write_text(str(time.time()))\n"
        "            raise ArithmeticError('only rank 1 breaks')\n"
    )
    file.write_text(text.replace(place, fails + place))

    done = det_ds("run", own_model / "experiment.yaml", own_model, "--run-dir", own_model / "run")

    lasted_s = time.time() - float((own_model / "failed_at").read_text())
    assert lasted_s < END_S
    assert done.returncode == 1
    first, last = done.stderr.index("rank 1 failed first"), done.stderr.index("only rank 1 breaks")
    assert first < last
    assert "Traceback" not in done.stderr[:first]
    assert done.stderr.count("Traceback") == 1, "the other rank's is a consequence"
    assert "trial.py" in done.stderr
    assert str(own_model / "run" / "logs") in done.stderr
    result = read_result(RunDir(own_model / "run"))
    assert result is not None
    assert (result.status, result.cause) == ("failed", "crash")
    assert result.reason == "ArithmeticError: only rank 1 breaks"


# --------------------------------------------------------------------- what takes no start of ranks


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been launched."""
    calls: list[dict[str, Any]] = []

    def run_ranks(words: list[str], **options: Any) -> Outcome:
        there = RunDir(options["run_dir"])
        metrics = there.current(there.metrics).read_text()
        calls.append({"trial": words[1], "arguments": words[6:], "metrics": metrics, **options})
        return Outcome()

    monkeypatch.setattr("determined_ds.launch.local_run.run_ranks", run_ranks)
    return calls


def test_what_is_launched(own_model: Path, launched: list[dict[str, Any]], tmp_path: Path) -> None:
    words = ["run", str(own_model / "experiment.yaml"), str(own_model), "--accelerator", "cpu", "--test"]
    result = CliRunner().invoke(main, [*words, "--slots", "4", "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert launched[0]["trial"] == "trial:TinyTrial"
    assert launched[0]["num_ranks"] == 4
    assert launched[0]["arguments"] == ["--test"]
    assert launched[0]["context_dir"] == own_model
    assert "8 = micro-batch 2 x 1 accumulated x 4 replicas" in result.stdout


def test_an_experiment_is_written_as_it_would_be_read(
    own_model: Path, launched: list[Any], tmp_path: Path
) -> None:
    """Strings that look like numbers, mappings that look like a search, one point of a real search."""
    overrides = {
        "name": '"1e3"',
        "description": '"2026-01-01"',
        "data.path": "größe.txt",
        "hyperparameters.tag": '"1e-3"',
        "hyperparameters.tiny": "1e-30",
        "hyperparameters.model": "{type: const, val: {type: mlp, sizes: [4, 1]}}",
        "hyperparameters.learning_rate": "{type: log, minval: -4, maxval: -2, base: 10}",
    }
    run = prepared(own_model, tmp_path / "run", *(f"{key}={value}" for key, value in overrides.items()))
    assert run.launch() == 0
    again = load_experiment(tmp_path / "run" / "experiment.yaml")
    assert again.name == "1e3"
    assert again.config["description"] == "2026-01-01"
    assert again.config["data"] == {"path": "größe.txt"}
    assert again.hyperparameters.data == run.experiment.hyperparameters.data
    assert again.hyperparameters.data["tag"] == "1e-3"
    assert again.hyperparameters.data["model"] == {"type": "mlp", "sizes": [4, 1]}
    assert again.hyperparameters.data["learning_rate"] == pytest.approx(1e-3)
    assert again.searched == ()


def test_two_runs_of_one_second_have_their_own_directories(
    own_model: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    folders = []
    for _ in range(2):
        run = prepared(own_model, None)
        run.launch()
        folders.append(run.run_dir)
    assert folders == [own_model / "runs/tiny/20260101-000000", own_model / "runs/tiny/20260101-000000-2"]


def test_layers_shared_out_by_their_times_are_drawn_at_the_end(
    own_model: Path, tmp_path: Path, launched: list[Any]
) -> None:
    pytest.importorskip("matplotlib")
    run = prepared(own_model, tmp_path / "run")
    run.run_dir.mkdir()
    (run.run_dir / "partition.json").write_text(SHARED_OUT.text())
    run.launch()
    assert (run.run_dir / "partition.png").is_file()


def test_stages_and_replicas_are_shown(own_model: Path, tmp_path: Path) -> None:
    run = prepared(own_model, tmp_path, "hyperparameters.pipe_parallel_size=2")
    assert "  slots      2 on cpu: 1 replica x 2 pipeline stages, ZeRO 1" in run.header()
    run = prepared(own_model, tmp_path, "hyperparameters.model_parallel_size=2")
    assert "  slots      2 on cpu: 1 replica x 2 model-parallel, ZeRO 1" in run.header()


def test_the_command_to_resume_with(own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_model)
    run = prepared(own_model, own_model / "my run")
    expected = "det-ds run 'my run/experiment.yaml' . --run-dir 'my run' --resume --accelerator cpu"
    assert run.resume_command == expected


def test_damaged_checkpoints_are_said_and_passed_over(
    run: Run, tmp_path: Path, launched: list[dict[str, Any]]
) -> None:
    """The newest one lost a file: the run goes on from the one before."""
    copied = tmp_path / "run"
    shutil.copytree(run.run_dir, copied)
    damaged = next(path.name for path in run.checkpoints() if run.steps_of(path) == 6)
    good = next(path.name for path in run.checkpoints() if run.steps_of(path) == 4)
    (copied / "checkpoints" / damaged / "trial_state.json").write_text("{}")
    words = ["run", str(copied / "experiment.yaml"), str(run.context), "--accelerator", "cpu"]
    result = CliRunner().invoke(main, [*words, "--run-dir", str(copied), "--resume"])
    assert result.exit_code == 0, result.output
    assert f"warning: checkpoint {damaged} is damaged" in result.stderr
    assert launched[0]["arguments"] == ["--resume", good]
    steps = [json.loads(line)["steps_completed"] for line in launched[0]["metrics"].splitlines()]
    assert max(steps) == 4
    assert max(series(copied, "training", "loss")) == 6, (
        "until the ranks have loaded it, the run stays as it was"
    )


def test_a_checkpoint_without_an_index_is_not_resumed_on_other_slots(
    run: Run, tmp_path: Path, launched: list[Any]
) -> None:
    """As older versions wrote them."""
    copied = tmp_path / "run"
    shutil.copytree(run.run_dir, copied)
    for path in (copied / "checkpoints").iterdir():
        (path / "model0" / INDEX_NAME).unlink()
        metadata = json.loads((path / "metadata.json").read_text())
        write_manifest(path, {name: fingerprint(path / name) for name in files_of(path)}, metadata)
    words = ["run", str(copied / "experiment.yaml"), str(run.context), "--accelerator", "cpu"]
    result = CliRunner().invoke(main, [*words, "--run-dir", str(copied), "--resume", "--slots", "4"])
    assert result.exit_code == EXIT_CONFIG
    assert "its files are not DeepSpeed" in result.stderr
    assert "resources.slots_per_trial = 4 (--slots)" in result.stderr
    assert "written by 2 ranks" in result.stderr
    assert "use --slots 2, or start anew" in result.stderr
    assert launched == []


def test_a_run_that_is_complete_says_so_and_is_left_alone(run: Run, launched: list[Any]) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.run_dir.rglob("*"))
    words = ["run", str(run.run_dir / "experiment.yaml"), str(run.context), "--accelerator", "cpu"]
    words += ["--run-dir", str(run.run_dir), "--resume", "--set"]
    result = CliRunner().invoke(main, [*words, f"{BATCHES}=6"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "  complete   this run is complete: 6 of 6 batches"
    result = CliRunner().invoke(main, [*words, f"{BATCHES}=5"])
    told = result.stdout.splitlines()[-1]
    assert told == "  complete   this run is complete: 6 batches are trained, max_length is 5"
    assert launched == []
    assert sorted((path, path.stat().st_mtime_ns) for path in run.run_dir.rglob("*")) == before
    assert prepared(run.context, run.run_dir, f"{BATCHES}=7", resume=True).complete == ""
