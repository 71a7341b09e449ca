"""What ``det-ds search`` refuses, in words and before any process is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.config.accelerator import Accelerator
from determined_ds.documents.document import get_path
from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import load_experiment
from determined_ds.search.machine_slots import Machine, machine_of, machine_warnings
from determined_ds.search.methods import Create, make_search, with_defaults
from determined_ds.search.setup import digest_of, prepare_search
from determined_ds.search.study import STUDY, About, SearchStudy

LR = "overwrite_deepspeed_args.optimizer.params.lr"


@pytest.fixture
def searched(own_model: Path) -> Path:
    """A search over the learning rate and the micro-batch."""
    config = yaml.safe_load((own_model / "experiment.yaml").read_text())
    config["resources"] = {"slots_per_trial": 1}
    config["hyperparameters"]["overwrite_deepspeed_args"] = {
        "optimizer": {"params": {"lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10}}},
        "train_micro_batch_size_per_gpu": {"type": "categorical", "vals": [4, 5]},
    }
    config["searcher"] = {
        "name": "random",
        "metric": "validation_loss",
        "max_trials": 3,
        "max_concurrent_trials": 2,
    }
    (own_model / "experiment.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return own_model


def search(context: Path, *words: str | Path, run_dir: str | None = "run") -> Result:
    """The command; with a run directory beside the context, unless there is none."""
    before = sorted(path for path in context.parent.rglob("*") if "trials" in path.parts)
    given: list[str | Path] = ["search", context / "experiment.yaml", context, "--accelerator", "cpu", *words]
    if run_dir is not None:
        given += ["--run-dir", context.parent / run_dir]
    done = CliRunner().invoke(main, [str(word) for word in given])
    after = sorted(path for path in context.parent.rglob("*") if "trials" in path.parts)
    assert before == after, "a trial was started"
    return done


def refused(done: Result, *said: str) -> None:
    assert done.exit_code == 2, done.output
    assert not isinstance(done.exception, (TypeError, KeyError, AttributeError, AssertionError))
    for words in (*said, "fix: "):
        assert words in done.output, done.output


def begun(context: Path) -> Path:
    """The folder of a search that was begun, and has no trial yet."""
    run_dir = context.parent / "run"
    run_dir.mkdir()
    experiment = load_experiment(context / "experiment.yaml")
    (run_dir / "experiment.yaml").write_text(yaml.safe_dump(experiment.config, sort_keys=False))
    about = About(
        name="tiny", metric="validation_loss", smaller_is_better=True, search=digest_of(experiment.config)
    )
    SearchStudy(run_dir / STUDY, about, experiment.space.axes)
    return run_dir


# ------------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("name", ["random", "grid"])
def test_a_search_that_searches_nothing(searched: Path, name: str) -> None:
    config = yaml.safe_load((searched / "experiment.yaml").read_text())
    config["searcher"] = {"name": name, "metric": "validation_loss", "max_trials": 3}
    if name == "grid":
        del config["searcher"]["max_trials"]
    config["hyperparameters"]["overwrite_deepspeed_args"] = {}
    (searched / "experiment.yaml").write_text(yaml.safe_dump(config))
    refused(search(searched), "searches nothing: no hyperparameter is a range", "or use single")


def test_a_metric_that_nobody_reports(searched: Path) -> None:
    done = search(searched, "--set", "searcher.metric=accuracy")
    refused(done, "searcher.metric = 'accuracy'", "it reports validation_loss", "write validation_loss")


def test_everything_that_is_wrong_is_said_at_once(searched: Path) -> None:
    done = search(
        searched,
        "--set",
        "searcher.metric=accuracy",
        "--set",
        "hyperparameters.global_batch_size=7",
        "--set",
        "x=1",
    )
    refused(done, "searcher.metric = 'accuracy'", "global_batch_size = 7", "x = 1 (--set x=1): unknown key")


def test_a_search_whose_every_point_is_known_to_be_impossible(searched: Path) -> None:
    batch = "hyperparameters.overwrite_deepspeed_args.train_micro_batch_size_per_gpu"
    refused(search(searched, "--set", f"{batch}=[5, 7]"), "train_micro_batch_size_per_gpu")
    refused(search(searched, "--set", "hyperparameters.global_batch_size=7"), "is not a multiple of")


def test_what_a_master_would_refuse(searched: Path) -> None:
    refused(search(searched, "--set", "searcher.max_trials=null"), "searcher.max_trials")
    refused(
        search(searched, "--set", "searcher.name=adaptive_asha"), "searcher.max_time", "searcher.time_metric"
    )
    refused(search(searched, "--set", "searcher.name=bayes"), "searcher.name")


# ---------------------------------------------------------------------------------------- the machine


def machine(cores: int, slots_per_trial: int, slots: int | None = None, wanted: int = 16) -> Machine:
    return Machine(
        accelerator=Accelerator(name="cpu", num_devices=cores, bf16=False, fp16=False),
        slots=slots or cores,
        slots_per_trial=slots_per_trial,
        wanted=wanted,
    )


def test_more_trials_at_once_than_slots_are_a_warning_with_the_numbers(searched: Path) -> None:
    experiment = load_experiment(searched / "experiment.yaml", ["resources.slots_per_trial=4"])
    [told] = machine_warnings(experiment, machine(4, 4))
    assert told.startswith("searcher.max_concurrent_trials = 2 (")
    assert told.endswith(
        "a trial takes 4 slots, and there are 4 on this machine (cpu): 1 trial runs at a time, the others wait"
    )
    assert not list(machine_warnings(experiment, machine(8, 4)))


def test_a_trial_larger_than_the_machine_runs_alone_on_its_cpus(searched: Path) -> None:
    experiment = load_experiment(
        searched / "experiment.yaml", ["resources.slots_per_trial=4", "searcher.max_concurrent_trials=1"]
    )
    [told] = machine_warnings(experiment, machine(2, 4))
    assert "a trial takes 4 slots, and there are 2 on this machine (cpu): one trial runs at a time" in told
    assert machine(2, 4).at_once == 1


def test_a_trial_larger_than_its_cpus_carry(searched: Path) -> None:
    cores = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)
    experiment = load_experiment(searched / "experiment.yaml", ["resources.slots_per_trial=9"])
    with pytest.raises(
        ConfigError, match=r"slots_per_trial = 9 .*: this machine carries 8 ranks \(2 CPU cores\)"
    ):
        machine_of(experiment, cores, None)


@pytest.mark.parametrize(
    ("searcher", "wanted"),
    [
        ({"name": "single"}, 1),
        ({"name": "random", "max_trials": 99}, 16),
        ({"name": "random", "max_trials": 99, "max_concurrent_trials": 3}, 3),
        ({"name": "grid", "max_concurrent_trials": 0}, 2**31),
        ({"name": "adaptive_asha", "max_trials": 9, "max_time": 99, "max_concurrent_trials": 1}, 2),
    ],
)
def test_no_more_trials_run_at_once_than_the_search_wants(
    searched: Path, searcher: dict[str, Any], wanted: int
) -> None:
    config = yaml.safe_load((searched / "experiment.yaml").read_text())
    config["searcher"] = {"metric": "validation_loss", "time_metric": "batches", **searcher}
    (searched / "experiment.yaml").write_text(yaml.safe_dump(config))
    cores = Accelerator(name="cpu", num_devices=64, bf16=False, fp16=False)
    found = machine_of(load_experiment(searched / "experiment.yaml"), cores, None)
    assert found.wanted == wanted
    assert found.at_once == min(64, wanted)


def test_trials_begin_with_the_weights_of_a_fork(searched: Path) -> None:
    """The very same checkpoint for all, whichever is the newest when one starts."""
    checkpoint = searched.parent / "other" / "checkpoints" / "abc"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text('{"steps_completed": 7}')

    def prepared(source: Path) -> Any:
        return prepare_search(
            searched / "experiment.yaml",
            searched,
            overrides=[f"searcher.source_checkpoint_uuid={source}"],
            run_dir=searched.parent / "run",
            accelerator="cpu",
        )

    plan = prepared(searched.parent / "other")
    document = plan.trial_document(next(iter(plan.search().start())))
    assert document.data["searcher"]["source_checkpoint_uuid"] == str(checkpoint)
    assert plan.about.search == prepared(checkpoint).about.search
    done = search(searched, "--set", "searcher.source_checkpoint_uuid=no-such")
    refused(done, "searcher.source_checkpoint_uuid", "there is no such folder")
    done = search(searched, "--set", "searcher.source_trial_id=1")
    refused(done, "searcher.source_trial_id = 1")


def test_gpus_are_never_shared(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Accelerator(name="cuda", num_devices=4, bf16=True, fp16=True)
    experiment = load_experiment(searched / "experiment.yaml", ["resources.slots_per_trial=2"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine_of(experiment, gpus, None)
    assert (found.at_once, found.gpus) == (2, ("0", "1", "2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,2,GPU-9")
    assert machine_of(experiment, gpus, 3).gpus == ("5", "7", "2")
    with pytest.raises(ConfigError, match="there are 4 on this machine"):
        machine_of(experiment, gpus, 5)
    with pytest.raises(ConfigError, match="takes more GPUs than the 1") as caught:
        machine_of(experiment, gpus, 1)
    assert "use --slots 1, or --accelerator cpu" in str(caught.value)


def test_no_slots_at_all(searched: Path) -> None:
    refused(search(searched, "--machine-slots", "0"), "--machine-slots = 0: must be 1 or more")


def test_threads_are_shared_out_where_trials_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """And left to ``det-ds run`` where one runs alone, so that it computes as it would by itself."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine(8, 2).threads == 1
    assert machine(8, 1, 2).threads == 4
    assert machine(8, 8).threads is None
    assert machine(8, 1, wanted=1).threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine(8, 2).threads is None


# --------------------------------------------------------------------------------- the run directory


def test_going_on_needs_to_know_with_what(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(searched.parent)
    refused(
        search(searched, "--resume", run_dir=None),
        "--resume: needs the --run-dir",
        "of the search to resume",
    )
    there = searched.parent / "runs/tiny/20260101-000000"
    there.mkdir(parents=True)
    (there / STUDY).touch()
    refused(search(searched, "--resume", run_dir=None), "add --run-dir runs/tiny/20260101-000000")


def test_a_folder_that_holds_no_search(searched: Path) -> None:
    refused(search(searched, "--resume"), "contains no search: there is no experiment.yaml in it")
    run_dir = searched.parent / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").touch()
    refused(search(searched, "--resume"), "contains a run of one trial, not a search")
    refused(search(searched), "contains a run of one trial, not a search")


def test_a_folder_that_holds_a_search_already(searched: Path) -> None:
    begun(searched)
    refused(search(searched), "already contains a search", "add --resume")


def test_another_search_than_that_which_was_begun(searched: Path) -> None:
    begun(searched)
    refused(
        search(searched, "--resume", "--set", "searcher.max_trials=9", "--set", f"hyperparameters.{LR}=0.5"),
        "searcher.max_trials = 9 (--set searcher.max_trials=9): was 3 when the search in",
        f"hyperparameters.{LR} = 0.5",
        "restore the earlier value",
    )
    refused(search(searched, "--resume", "--slots", "2"), "resources.slots_per_trial = 2 (--slots): was 1")


def test_what_does_not_decide_a_search_may_change(searched: Path) -> None:
    run_dir = begun(searched)
    plan = prepare_search(
        searched / "experiment.yaml",
        searched,
        overrides=["description=another", "max_restarts=1"],
        run_dir=run_dir,
        resume=True,
        accelerator="cpu",
    )
    assert plan.max_restarts == 1
    before = load_experiment(run_dir / "experiment.yaml")
    assert plan.about.search == digest_of(before.config)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello\n", "is not a study file"),
        (b'{"op_code":0,"worker_id":"x"}\n{"op\n', "is damaged: line 2 of 2"),
    ],
)
def test_a_study_file_that_is_none(searched: Path, content: bytes, said: str) -> None:
    run_dir = begun(searched)
    (run_dir / STUDY).write_bytes(content)
    refused(search(searched, "--resume"), said, str(run_dir / STUDY), "start again in another --run-dir")
    assert (run_dir / STUDY).read_bytes() == content


def test_a_study_file_of_another_search(searched: Path) -> None:
    run_dir = begun(searched)
    changed = {**load_experiment(searched / "experiment.yaml").config, "data": {"other": 1}}
    for path in (run_dir / "experiment.yaml", searched / "experiment.yaml"):
        path.write_text(yaml.safe_dump(changed, sort_keys=False))
    refused(search(searched, "--resume"), "is of another search, tiny, than")


def written_down(context: Path, seed: int | None = None) -> Path:
    """The folder of a search whose first trial has been started; with another seed than its own, where one is given."""
    run_dir = begun(context)
    experiment = load_experiment(context / "experiment.yaml")
    searcher = with_defaults(experiment.config["searcher"])
    about = About(
        name="tiny", metric="validation_loss", smaller_is_better=True, search=digest_of(experiment.config)
    )
    study = SearchStudy(run_dir / STUDY, about, experiment.space.axes)
    for number, create in enumerate(make_search(searcher, experiment.space).start(), start=1):
        assert isinstance(create, Create)
        point = {axis.name: get_path(create.hparams, axis.path) for axis in experiment.space.axes}
        study.add(
            number, replace(create, seed=create.seed if seed is None else seed), point, f"trials/{number:04d}"
        )
    study.started(1)
    return run_dir


def test_a_study_file_that_holds_other_trials(searched: Path) -> None:
    written_down(searched, seed=1)
    refused(search(searched, "--resume"), "holds another trial 1 than this search creates")


def test_a_metric_that_only_a_trial_itself_can_tell_to_be_missing(searched: Path) -> None:
    """A trial has validated, and what the search goes by is not among its metrics: no other would be better off."""
    folder = written_down(searched) / "trials" / "0001"
    folder.mkdir(parents=True)
    record = {
        "group": "validation",
        "steps_completed": 2,
        "metrics": {"accuracy": 0.5, "validation_loss": "many"},
    }
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    refused(
        search(searched, "--resume"),
        "searcher.metric = 'validation_loss'",
        "trial 1 does not report it as a number at validation; it reports accuracy, validation_loss",
    )


def test_a_folder_that_cannot_be_written_to(searched: Path) -> None:
    (searched.parent / "file").touch()
    refused(search(searched, run_dir="file/run"), "is a file, not a folder")
