"""What a check makes of a whole experiment: a script, another's trial, a flag, a launcher, stored checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import findings, report_of

CONST = "experiments/gpt2/const.yaml"
SCRIPT = "entrypoint=python3 train.py"
DETERMINEDS = "python3 -m determined.launch.deepspeed python3 -m determined_ds.train trial:T"


def told(*overrides: str) -> list[tuple[str, str, str]]:
    options = [word for override in overrides for word in ("--set", override)]
    return [(each.severity, each.code, each.key) for each in findings(CONST, *options)]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        # A script may decide what is not stated; what is stated is checked, and what its code cannot honour.
        (
            [
                "entrypoint=[python3, train.py]",
                "hyperparameters.global_batch_size=33",
                "hyperparameters.fit=null",
            ],
            ("error", "batch", "hyperparameters.global_batch_size"),
        ),
        ([SCRIPT, "hyperparameters.deepspeed_config=null"], ("note", "left-open", "entrypoint")),
        (
            [SCRIPT, "hyperparameters.logging.wandb.project=x"],
            ("warning", "logger-script", "hyperparameters.logging"),
        ),
        # Another command is left to Determined.
        (
            ["entrypoint=python3 -m determined.launch.x", "hyperparameters.global_batch_size=33"],
            ("warning", "entrypoint", "entrypoint"),
        ),
        (["entrypoint=python3 -m determined_ds.trian trial:T"], ("error", "entrypoint", "entrypoint")),
        # Of a section that is none, only that is said.
        *(([f"{key}=3"], ("error", "wrong-type", key)) for key in ("hyperparameters", "hyperparameters.fit")),
        *(([f"{key}=3"], ("error", "wrong-type", key)) for key in ("searcher", "entrypoint")),
    ],
)
def test_one_thing_is_found(project: Path, overrides: list[str], found: tuple[str, str, str]) -> None:
    (project / "train.py").write_text("import deepspeed\nmetrics = dict(validation_loss=0)\n")
    assert told(*overrides) == [found]


def test_a_script_that_is_not_there_is_answered_with_the_nearest(project: Path) -> None:
    (project / "train.py").touch()
    (missing,) = findings(CONST, "--set", SCRIPT.replace("train", "trian"))
    assert missing.fix == "did you mean train.py?"


def test_a_trial_in_determineds_own_form_is_checked_like_ours(project: Path) -> None:
    """Its length is that of the searcher, and its periods are read."""
    trial = "entrypoint=python3 -m determined.launch.deepspeed --trial model_defs.gpt2.trial:GPT2Trial"
    length = ("hyperparameters.fit=null", "searcher.max_length.batches=7", "min_validation_period.batches=3")
    assert {code for _, code, _ in told(trial, *length)} == {"deprecated-key"}
    assert ("error", "max-length", "hyperparameters.fit.max_length") in told(trial, length[0])


@pytest.mark.parametrize(
    ("entrypoint", "resources", "warns"),
    [
        (DETERMINEDS, {"slots_per_trial": 9}, True),
        (DETERMINEDS, {"slots_per_trial": 16, "is_single_node": True}, False),
        (DETERMINEDS.replace("deepspeed", "torch_distributed", 1), {"slots_per_trial": 16}, False),
    ],
)
def test_determineds_launcher_of_deepspeed_is_warned_of_where_a_trial_spans_machines(
    tmp_path: Path, entrypoint: str, resources: dict[str, Any], warns: bool
) -> None:
    batch = {"global_batch_size": 144}
    report = report_of(tmp_path, entrypoint=entrypoint, resources=resources, hyperparameters=batch)
    assert [each.code for each in report["findings"]] == ["launcher-machines"] * warns


@pytest.mark.parametrize(
    ("key", "kept", "limit", "warns"),
    [
        ("save_trial_best", 2, 5, True),
        ("save_trial_latest", 3, 2, True),
        ("save_trial_latest", 3, 3, False),
    ],
)
def test_a_limit_that_may_delete_what_is_to_be_kept_is_a_warning(
    tmp_path: Path, key: str, kept: int, limit: int, warns: bool
) -> None:
    """While training, only the best and the newest are sure to be kept."""
    fit = {"max_length": {"batches": 64}, "save_total_limit": limit}
    report = report_of(tmp_path, checkpoint_storage={key: kept}, hyperparameters={"fit": fit})
    assert [each.key for each in report["findings"]] == [f"checkpoint_storage.{key}"] * warns
