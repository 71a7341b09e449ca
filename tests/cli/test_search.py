"""``det-ds search``: how it shares a machine out, begins its trials, and is resumed as the same search."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import Result

from determined_ds import Accelerator, ConfigError, load_experiment
from tests.cli.own_runs import LENGTH, invoke
from tests.harness.command import det_ds
from tests.package import checkpoints, trials_at_once

LR = "hyperparameters.overwrite_deepspeed_args.optimizer.params.lr"


@pytest.fixture
def searched(own_model: Path) -> Path:
    """A search over the learning rate and the micro-batch."""
    config = yaml.safe_load((own_model / "experiment.yaml").read_text())
    config["resources"] = {"slots_per_trial": 1}
    config["hyperparameters"]["overwrite_deepspeed_args"] = {
        "optimizer": {"params": {"lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10, "count": 50}}},
        "train_micro_batch_size_per_gpu": {"type": "categorical", "vals": [4, 8]},
    }
    config["searcher"] = {"name": "random", "metric": "validation_loss", "max_trials": 3}
    (own_model / "experiment.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return own_model


def search(context: Path, *words: str | Path, sets: tuple[str, ...] = ()) -> Result:
    """The command with a run directory beside the context; no trial is started."""
    before = sorted(path for path in context.parent.rglob("*") if "trials" in path.parts)
    given: list[str | Path] = [*words, *(word for override in sets for word in ("--set", override))]
    done = invoke("search", context, *given, "--run-dir", context.parent / "run")
    assert before == sorted(path for path in context.parent.rglob("*") if "trials" in path.parts)
    return done


def refused(done: Result, *said: str) -> None:
    assert done.exit_code == 2, done.output
    for words in (*said, "fix: "):
        assert words in done.output, done.output


def test_trials_begin_with_the_weights_of_a_fork(trained: Path, searched: Path) -> None:
    """The very same checkpoint for all, whichever is the newest when one starts; more than fit in wait."""
    sets = [f"searcher.source_checkpoint_uuid={trained / 'run'}", f"{LENGTH}=1", "searcher.max_trials=2"]
    words = [word for override in ("resources.max_slots=1", *sets) for word in ("--set", override)]
    run_dir = searched.parent / "run"
    done = det_ds("search", searched / "experiment.yaml", searched, "--run-dir", run_dir, *words)
    assert done.returncode == 0, done.stderr
    trials = [yaml.safe_load(path.read_text()) for path in run_dir.glob("trials/*/experiment.yaml")]
    newest = str(checkpoints(trained / "run")[0])
    assert [trial["searcher"]["source_checkpoint_uuid"] for trial in trials] == [newest, newest]


def test_gpus_are_never_shared(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Accelerator(name="cuda", num_devices=4, bf16=True, fp16=True)
    experiment = load_experiment(searched / "experiment.yaml", ["resources.slots_per_trial=2"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trials_at_once(experiment, gpus) == (2, ("0", "1", "2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,2,GPU-9")
    assert trials_at_once(experiment, gpus) == (2, ("5", "7", "2", "GPU-9"))
    with pytest.raises(ConfigError, match="carries 1 ranks"):
        trials_at_once(experiment, Accelerator(name="cuda", num_devices=1, bf16=True, fp16=True))


def test_another_search_than_that_which_was_begun(searched: Path) -> None:
    config, begun = searched / "experiment.yaml", searched.parent / "run"
    stated = yaml.safe_load(config.read_text())
    stated["searcher"]["max_trials"] = 1
    stated["hyperparameters"]["fit"]["max_length"] = {"batches": 2}
    config.write_text(yaml.safe_dump(stated, sort_keys=False))
    done = det_ds("search", config, searched, "--run-dir", begun)
    assert done.returncode == 0, done.stderr
    refused(search(searched), "already contains a search", "add --resume")
    refused(
        search(searched, "--resume", sets=("searcher.max_trials=9", f"{LR}=0.5")),
        "searcher.max_trials = 9 (--set searcher.max_trials=9): was 1 when the search in",
        f"{LR} = 0.5",
    )
    same = search(searched, "--resume", sets=("description=another", "max_restarts=1"))
    assert same.exit_code == 0, same.output


def test_a_metric_that_only_a_trial_itself_can_tell_to_be_missing(searched: Path) -> None:
    """A trial has validated, and what the search goes by is not among its metrics: no other would be better off."""
    trial = searched / "trial.py"
    other = "\n    def evaluate_batch(self, dataloader_iter, batch_idx):\n        next(dataloader_iter)\n"
    trial.write_text(trial.read_text() + other + "        return dict([('accu' + 'racy', 0.5)])\n")
    words = ["--set", f"{LENGTH}=2", "--run-dir", searched.parent / "run"]
    done = det_ds("search", searched / "experiment.yaml", searched, *words)
    assert done.returncode == 2, done.stderr
    assert "does not report it as a number at validation; it reports accuracy" in done.stderr
