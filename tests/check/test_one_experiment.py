"""What a check makes of a whole experiment: a script, another's trial, a flag, a launcher, stored checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import findings, report_of

CONST = "experiments/gpt2/const.yaml"
SEARCH = "experiments/gpt2/search.yaml"
DETERMINEDS = "python3 -m determined.launch.deepspeed python3 -m determined_ds.train trial:T"


def told(file: str, *overrides: str) -> list[tuple[str, str, str]]:
    options = [word for override in overrides for word in ("--set", override)]
    return [(each.severity, each.code, each.key) for each in findings(file, *options)]


@pytest.mark.parametrize("entrypoint", ["python3 train.py", "[python3, train.py]"])
def test_of_a_script_what_the_experiment_states_is_checked(project: Path, entrypoint: str) -> None:
    (project / "train.py").write_text("import deepspeed\nmetrics = dict(validation_loss=0)\n")
    script = f"entrypoint={entrypoint}"
    found = told(CONST, script, "hyperparameters.global_batch_size=33", "hyperparameters.fit=null")
    assert found == [("error", "batch", "hyperparameters.global_batch_size")]
    ((severity, code, _),) = told(CONST, script, "hyperparameters.deepspeed_config=null")
    assert (severity, code) == ("note", "left-open")
    (missing,) = findings(CONST, "--set", script.replace("train.py", "trian.py"))
    assert missing.fix == "did you mean train.py?"


def test_a_trial_in_determineds_own_form_is_checked_like_ours(project: Path) -> None:
    """Its length is that of the searcher, and its periods are read."""
    trial = "entrypoint=python3 -m determined.launch.deepspeed --trial model_defs.gpt2.trial:GPT2Trial"
    length = ("hyperparameters.fit=null", "searcher.max_length.batches=7", "min_validation_period.batches=3")
    assert {code for _, code, _ in told(CONST, trial, *length)} == {"deprecated-key"}
    assert ("error", "max-length", "hyperparameters.fit.max_length") in told(CONST, trial, length[0])


@pytest.mark.parametrize(
    ("entrypoint", "batch", "severity"),
    [
        ("python3 -m determined.launch.x", 33, "warning"),  # another command is left to Determined
        ("python3 -m determined_ds.trian model_defs.gpt2.trial:GPT2Trial", 32, "error"),
    ],
)
def test_a_command_that_trains_nothing(project: Path, entrypoint: str, batch: int, severity: str) -> None:
    found = told(CONST, f"entrypoint={entrypoint}", f"hyperparameters.global_batch_size={batch}")
    assert [(each, key) for each, _, key in found] == [(severity, "entrypoint")]


@pytest.mark.parametrize(
    ("entrypoint", "resources", "warns"),
    [
        (DETERMINEDS, {"slots_per_trial": 9}, True),
        (DETERMINEDS, {"slots_per_trial": 16, "is_single_node": True}, False),
        (DETERMINEDS.replace("deepspeed", "torch_distributed", 1), {"slots_per_trial": 16}, False),
    ],
)
def test_determineds_launcher_of_deepspeed_is_warned_of_where_a_trial_spans_machines(
    tmp_path: Path, entrypoint: Any, resources: dict[str, Any], warns: bool
) -> None:
    batch = {"global_batch_size": 144}
    report = report_of(tmp_path, entrypoint=entrypoint, resources=resources, hyperparameters=batch)
    assert [each.code for each in report["findings"]] == ["launcher-machines"] * warns


@pytest.mark.parametrize(
    ("storage", "limit", "key"),
    [
        ({"save_trial_best": 2}, 5, "save_trial_best"),
        ({"save_trial_latest": 3}, 2, "save_trial_latest"),
        ({"save_trial_latest": 3}, 3, None),
    ],
)
def test_a_limit_that_may_delete_what_is_to_be_kept_is_a_warning(
    tmp_path: Path, storage: dict[str, Any], limit: int | None, key: str | None
) -> None:
    """While training, only the best and the newest are sure to be kept."""
    fit = {"max_length": {"batches": 64}, **({"save_total_limit": limit} if limit else {})}
    report = report_of(tmp_path, checkpoint_storage=storage, hyperparameters={"fit": fit})
    assert [each.key for each in report["findings"]] == ([f"checkpoint_storage.{key}"] if key else [])


@pytest.mark.parametrize("section", ["hyperparameters", "hyperparameters.fit", "searcher", "entrypoint"])
def test_of_a_section_that_is_none_only_that_is_said(project: Path, section: str) -> None:
    assert told(SEARCH, f"{section}=3") == [("error", "wrong-type", section)]
