"""Going on with a run, from another, and after a crash; and what an experiment asks of its ranks: real runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from determined_ds import load_state_dict_from_checkpoint_path
from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG, EXIT_CRASHED
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.restarting import Restarts
from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.cli.conftest import OWN_MODEL
from tests.command import det_ds

LENGTH = "hyperparameters.fit.max_length.batches"
RATE = "hyperparameters.overwrite_deepspeed_args.optimizer.params.lr"
SOURCE = "searcher.source_checkpoint_uuid"
WARM_START = "hyperparameters.fit.warm_start"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``own_model`` and ``run``: six batches by two ranks, checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(OWN_MODEL, folder / "own_model", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(folder / "own_model", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(trained / "own_model", tmp_path / "own_model")
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path


def run(context: Path, run_dir: Path, *options: str | Path, sets: Any = ()) -> Any:
    words = [word for override in sets for word in ("--set", override)]
    return det_ds("run", context / "experiment.yaml", context, "--run-dir", run_dir, *options, *words)


def invoke(folder: Path, *words: str, run_dir: str = "run") -> Any:
    """``det-ds run`` in this process, where no rank is started."""
    config = str(folder / "own_model/experiment.yaml")
    where = ["--run-dir", str(folder / run_dir), "--accelerator", "cpu"]
    return CliRunner().invoke(main, ["run", config, str(folder / "own_model"), *where, *words])


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


def reports(run_dir: Path, group: str = "training") -> list[tuple[int, dict[str, Any]]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["steps_completed"], r["metrics"]) for r in records if r["group"] == group]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_state_dict_from_checkpoint_path(checkpoints_in(run_dir / "checkpoints")[0].path)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def contents(run_dir: Path) -> dict[str, bytes]:
    """Every file of a run but its ranks' logs, and the lock that tells who wrote to it last."""
    files = {str(path.relative_to(run_dir)): path for path in run_dir.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(("logs", ".lock"))}


# -------------------------------------------------------------------------------- with changed settings


def test_a_changed_rate_is_told_and_takes_effect(copied: Path) -> None:
    before = weights(copied / "run")
    done = run(copied / "own_model", copied / "run", "--resume", sets=[f"{LENGTH}=7", f"{RATE}=0"])
    assert done.returncode == 0, done.stderr
    assert "  resume     batch 6, checkpoint " in done.stdout
    assert "  changed    hyperparameters.fit.max_length.batches: 6 -> 7\n" in done.stdout
    assert "             deepspeed optimizer.params.lr: 0.01 -> 0" in done.stdout
    assert reports(copied / "run")[-1][1]["lr"] == 0.0
    assert same(before, weights(copied / "run"))
    kept = yaml.safe_load((copied / "run/experiment.yaml").read_text())["hyperparameters"]
    assert kept["overwrite_deepspeed_args"]["optimizer"]["params"]["lr"] == 0
    given = json.loads((copied / "run/deepspeed_config.json").read_text())
    assert given["optimizer"]["params"]["lr"] == 0
    assert not (copied / "run/.next").exists()
    hparams = json.loads((checkpoints_in(copied / "run/checkpoints")[0].path / "load_data.json").read_text())
    assert Path(hparams["hparams"]["deepspeed_config"]) == copied / "run/deepspeed_config.json"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("hyperparameters.global_batch_size=16", "deepspeed train_batch_size = 16"),
        (
            "hyperparameters.overwrite_deepspeed_args.optimizer.params.amsgrad=true",
            "optimizer.params.amsgrad = true",
        ),
        ("reproducibility.experiment_seed=5", "reproducibility.experiment_seed = 5"),
        ("entrypoint=python3 -m determined_ds.train other:Trial", "entrypoint = ['other:Trial']"),
    ],
)
def test_what_must_stay_is_refused_before_a_rank_is_started(trained: Path, override: str, told: str) -> None:
    before = contents(trained / "run")
    result = invoke(trained, "--resume", "--set", f"{LENGTH}=9", "--set", override)
    assert result.exit_code == EXIT_CONFIG, result.output
    assert told in result.stderr
    assert "when checkpoint" in result.stderr
    assert "fix: go back to" in result.stderr
    assert contents(trained / "run") == before


def test_another_model_is_refused_in_a_message_and_the_run_is_as_it_was(copied: Path) -> None:
    edit(copied / "own_model/trial.py", "torch.nn.Linear(4, 1)", "torch.nn.Linear(4, 1, bias=False)")
    before = contents(copied / "run")
    sets = [f"{LENGTH}=9", "description=another"]
    done = run(copied / "own_model", copied / "run", "--resume", sets=sets)
    assert done.returncode == EXIT_CONFIG, done.stderr
    uuid = checkpoints_in(copied / "run/checkpoints")[0].uuid
    assert (
        f"error: checkpoint = '{uuid}': does not fit this model and this optimizer: bias (1,)" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert contents(copied / "run") == before


# -------------------------------------------------------------------------------- from another run


def test_a_fork_begins_with_the_weights_and_counts_from_zero(copied: Path) -> None:
    """And goes on, when it is resumed, from its own."""
    sets = [f"{LENGTH}=1", f"{RATE}=0", f"{SOURCE}={copied / 'run'}"]
    done = run(copied / "own_model", copied / "fork", sets=sets)
    assert done.returncode == 0, done.stderr
    uuid = checkpoints_in(copied / "run/checkpoints")[0].uuid
    assert re.search(rf"  fork       batch 6 of .*/run, checkpoint {uuid}\n", done.stdout)
    assert f"checkpoint {uuid}: its weights alone, with a new optimizer and schedule; counting" in done.stdout
    assert [step for step, _ in reports(copied / "fork")] == [1]
    assert same(weights(copied / "run"), weights(copied / "fork"))
    config = yaml.safe_load((copied / "fork/experiment.yaml").read_text())
    assert config["searcher"]["source_checkpoint_uuid"] == str(copied / "run/checkpoints" / uuid)

    shutil.rmtree(copied / "run")
    sets = [f"{LENGTH}=2", f"{RATE}=0.1", f"{SOURCE}={copied / 'run'}"]
    again = run(copied / "own_model", copied / "fork", "--resume", sets=sets)
    assert again.returncode == 0, again.stderr
    assert "  fork " not in again.stdout
    assert [step for step, _ in reports(copied / "fork")] == [1, 2]


def test_where_a_fork_is_looked_for(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of a run or of a checkpoint; a uuid below ``runs``, or among the neighbours of the run directory."""
    newest, middle, _ = checkpoints_in(trained / "run/checkpoints")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", tmp_path / "runs/tiny/one")
    monkeypatch.setattr("determined_ds.launch.local_run.run_ranks", lambda *_, **__: Outcome())

    def forked_from(source: str, run_dir: str) -> str:
        result = invoke(trained, "--set", f"{SOURCE}={source}", run_dir=run_dir)
        assert result.exit_code == 0, result.output
        shutil.rmtree(trained / run_dir)
        return next(line for line in result.stdout.splitlines() if line.startswith("  fork "))

    assert f"batch 6 of tiny/one, checkpoint {newest.uuid}" in forked_from("runs/tiny/one", "a")
    assert f"batch 4 of {trained.name}/run" in forked_from(str(middle.path), "b")
    assert f"batch 4 of tiny/one, checkpoint {middle.uuid}" in forked_from(middle.uuid, "c")
    shutil.rmtree(tmp_path / "runs")
    assert f"batch 4 of {trained.name}/run" in forked_from(middle.uuid, "d")


def test_a_fork_that_cannot_be_is_refused(copied: Path) -> None:
    newest = checkpoints_in(copied / "run/checkpoints")[0].path

    def refused(*words: str) -> str:
        result = invoke(copied, *words, run_dir="fork")
        assert result.exit_code == EXIT_CONFIG, result.output
        assert not (copied / "fork").exists()
        return str(result.stderr)

    told = refused("--set", "searcher.source_trial_id=7")
    assert (
        "searcher.source_trial_id = 7 (--set searcher.source_trial_id=7): names a trial on a cluster" in told
    )
    assert "source_checkpoint_uuid: write the path of a run directory" in told
    assert "there is no such folder" in refused("--set", f"{SOURCE}=no-such-uuid")
    every = ("--set", f"{SOURCE}={newest}", "--set", f"{WARM_START}=all")
    kind = "hyperparameters.overwrite_deepspeed_args.optimizer.params.amsgrad=true"
    assert "optimizer.params.amsgrad = true" in refused(*every, "--set", kind)
    assert "use one of weights, all" in refused("--set", f"{WARM_START}=optimizer")
    assert "must be a checkpoint" in refused("--set", f"{SOURCE}={copied / 'own_model'}")
    (newest / "trial_state.json").write_text("{}")
    assert "trial_state.json has 2 bytes" in refused("--set", f"{SOURCE}={newest}")


# -------------------------------------------------------------------------------- after a crash


CRASHES = """
        import os, pathlib, signal
        number = self.context._current_batch_idx + 1
        flag = pathlib.Path({folder!r}) / f"crashed-{{number}}"
        if number in (4, 5) and model.training and self.context.distributed.rank == 1 and not flag.exists():
            flag.touch()
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("once only")
"""
PLACE = "        inputs_B4, targets_B1 = batch\n"


def test_a_crash_is_followed_by_restarts_from_the_newest_checkpoint(
    own_model: Path, trained: Path, tmp_path: Path
) -> None:
    """Killed in batch 4, failed in batch 5: it ends with the weights of the run that never crashed."""
    edit(own_model / "trial.py", PLACE, CRASHES.format(folder=str(tmp_path)) + PLACE)
    done = run(own_model, tmp_path / "run", sets=["max_restarts=2"])
    assert done.returncode == 0, done.stderr
    told = re.findall(r"restart (\d) of 2 from checkpoint \S+ at batch (\d); it crashed: (.*)", done.stderr)
    assert [(number, batch) for number, batch, _ in told] == [("1", "2"), ("2", "4")]
    assert "killed by SIGKILL" in told[0][2]
    assert told[1][2] == "ArithmeticError: once only"
    assert [step for step, _ in reports(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert same(weights(tmp_path / "run"), weights(trained / "run"))


def test_what_fails_before_its_first_batch_is_not_restarted(own_model: Path, tmp_path: Path) -> None:
    edit(own_model / "trial.py", PLACE, "        raise ArithmeticError('always')\n" + PLACE)
    done = run(own_model, tmp_path / "run", sets=["max_restarts=3"])
    assert done.returncode == 1
    assert "ArithmeticError: always" in done.stderr
    assert "restart" not in done.stderr


@pytest.mark.parametrize(
    ("failure", "signals", "restarts"),
    [
        ({"code": -9}, (), True),
        ({"code": 3, "exit_code": EXIT_CRASHED, "message": "ValueError: x"}, (), True),
        ({"code": 1, "exit_code": 1, "message": "the loss was not finite"}, (), False),
        ({"code": 2, "exit_code": 2, "message": "x: is wrong"}, (), False),
        ({"code": 7}, (), False),
        ({"code": -9}, (15,), False),
        (None, (), False),
    ],
    ids=["killed", "crashed", "diagnosed", "configuration", "exit", "stopped", "complete"],
)
def test_what_is_restarted(
    failure: dict[str, Any] | None, signals: tuple[int, ...], restarts: bool, tmp_path: Path
) -> None:
    failures = () if failure is None else (Failure(rank=0, time=0.0, **failure),)
    outcome = Outcome(failures=failures, signals=signals)
    again = Restarts(allowed=1, run_dir=tmp_path)
    assert (again.after(outcome) is not None) == restarts
    assert again.after(outcome) is None, "one was allowed"
    assert Restarts(allowed=0, run_dir=tmp_path).after(outcome) is None


# -------------------------------------------------------------------------------- what ranks are asked for


def test_environment_debug_and_system_metrics(own_model: Path, tmp_path: Path) -> None:
    seen = "        import os\n        print('TOLD', os.environ.get('TOLD'), os.environ.get('HOME'), flush=True)\n"
    edit(
        own_model / "trial.py",
        "        return torch.nn.Linear(4, 1)",
        seen + "        return torch.nn.Linear(4, 1)",
    )
    config = yaml.safe_load((own_model / "experiment.yaml").read_text())
    config["environment"] = {
        "environment_variables": {"cpu": ["TOLD=yes", "HOME", "RANK=7"], "cuda": ["TOLD=no"]}
    }
    config["debug"] = True
    config["profiling"] = {"enabled": True}
    (own_model / "experiment.yaml").write_text(yaml.safe_dump(config))
    done = run(own_model, tmp_path / "run", sets=[f"{LENGTH}=2"])
    assert done.returncode == 0, done.stderr
    assert "TOLD yes None" in done.stdout
    assert "environment.environment_variables.cpu.2" in done.stderr
    assert "RANK is set by the launch" in done.stderr
    assert "DEBUG" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/system_metrics.jsonl").read_text().splitlines()]
    assert {"cpu", "memory"} <= {line["group"] for line in lines}
    [of_machine] = next(line for line in lines if line["group"] == "memory")["metrics"].values()
    assert of_machine["memory_free"] > 0


def test_a_metric_that_the_trial_does_not_report_is_refused_before_it_trains(own_model: Path) -> None:
    result = invoke(own_model.parent, "--set", "searcher.metric=accuracy")
    assert result.exit_code == EXIT_CONFIG
    assert "TinyTrial does not report it at validation; it reports validation_loss" in result.stderr
