"""What a check makes of a whole experiment: which problems it tells, how severe they are, and which it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from determined_ds.check.inputs import check_files
from determined_ds.check.output import Report

CONST = "experiments/gpt2/const.yaml"
SEARCH = "experiments/gpt2/search.yaml"


def report(file: str, *overrides: str) -> Report:
    return check_files([Path(file)], overrides=overrides)[0]


def told(found: Report) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.problem.code, finding.problem.key) for finding in found.findings]


@pytest.mark.parametrize("entrypoint", ["python3 train.py", "[python3, train.py]"])
def test_of_a_script_what_the_experiment_states_is_checked(project: Path, entrypoint: str) -> None:
    (project / "train.py").write_text("import deepspeed\nmetrics = dict(validation_loss=0)\n")
    script = f"entrypoint={entrypoint}"
    found = report(CONST, script, "hyperparameters.global_batch_size=33", "hyperparameters.fit=null")
    assert told(found) == [("error", "batch", "hyperparameters.global_batch_size")]
    (note,) = report(CONST, script, "hyperparameters.deepspeed_config=null").findings
    assert (note.severity, note.problem.code) == ("note", "left-open")
    assert report(CONST, script, "resources.slots_per_trial=0").count("error") == 0
    (project / "train.py").write_text("import deepspeed\n")
    assert "metric-unknown" in {code for _, code, _ in told(report(CONST, script))}
    (missing,) = report(CONST, script.replace("train.py", "trian.py")).findings
    assert missing.problem.fix == "did you mean train.py?"


def test_a_trial_in_determineds_own_form_is_checked_like_ours(project: Path) -> None:
    """Its length is that of the searcher, and its periods are read."""
    trial = "entrypoint=python3 -m determined.launch.deepspeed --trial model_defs.gpt2.trial:GPT2Trial"
    length = ("hyperparameters.fit=null", "searcher.max_length.batches=7", "min_validation_period.batches=3")
    found = report(CONST, trial, *length)
    assert {code for _, code, _ in told(found)} == {"deprecated-key"}
    assert ("error", "max-length", "hyperparameters.fit.max_length") in told(report(CONST, trial, length[0]))


def test_another_command_is_left_to_determined(project: Path) -> None:
    found = report(CONST, "entrypoint=python3 -m determined.launch.x", "hyperparameters.global_batch_size=33")
    assert [(severity, key) for severity, _, key in told(found)] == [("warning", "entrypoint")]


def test_a_slip_in_our_own_entrypoint_is_an_error(project: Path) -> None:
    found = report(CONST, "entrypoint=python3 -m determined_ds.trian model_defs.gpt2.trial:GPT2Trial")
    assert told(found) == [("error", "entrypoint", "entrypoint")]


@pytest.mark.parametrize(
    "override",
    [
        "hyperparameters.learning_rate={type: log, minval: -2, maxval: -3, base: 10}",
        "hyperparameters.global_batch_size={type: categorical, vals: 32}",
        "searcher.name=adaptive_simple",
    ],
)
def test_a_mistake_is_told_once_and_not_what_follows_from_it(project: Path, override: str) -> None:
    found = report(SEARCH, override)
    assert len(found.findings) == 1
    assert found.count("error") == 1


def test_what_a_flag_made_is_said_to_be_the_flags(project: Path) -> None:
    override = "hyperparameters.fit.max_lenght.batches=4"
    (finding,) = report(CONST, override).findings
    assert finding.problem.origin == f"--set {override}"


def test_the_context_is_the_folder_that_has_trial_and_json(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The current folder has the trial too, but not the JSON that the experiment in the other names."""
    other = tmp_path_factory.mktemp("other")
    for folder in ("model_defs", "experiments"):
        shutil.copytree(project / folder, other / folder)
    (other / "experiments/deepspeed/zero1.json").rename(other / "experiments/deepspeed/mine.json")
    config = other / CONST
    config.write_text(config.read_text().replace("zero1.json", "mine.json"))
    assert check_files([config])[0].findings == ()


def test_slices_are_refused_for_a_trial_of_whole_sequences(project: Path) -> None:
    split = "hyperparameters.sequence_parallel_size=2"
    assert report(CONST, split).count("error") == 0
    trial = project / "model_defs" / "gpt2" / "trial.py"
    trial.write_text(trial.read_text().replace("    sequence_parallel = True\n", ""))
    expected = ("error", "sequence-trial", "hyperparameters.sequence_parallel_size")
    assert told(report(CONST, split)) == [expected]
