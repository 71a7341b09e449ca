"""``checkpoint_storage.save_*`` as an experiment states it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.documents.yaml_text import parse_yaml
from determined_ds.experiment.save_policy import SavePolicy, limit_problem, stated_policy
from tests.making import refusal


@pytest.mark.parametrize(
    ("section", "policy"),
    [
        ("null", None),
        ("{}", None),
        ("{type: s3, bucket: mine}", None),
        ("{save_trial_best: null}", None),
        ("{save_trial_best: 3}", SavePolicy(save_experiment_best=0, save_trial_best=3, save_trial_latest=1)),
        (
            "{save_experiment_best: 2}",
            SavePolicy(save_experiment_best=2, save_trial_best=1, save_trial_latest=1),
        ),
        (
            "{save_trial_latest: 0}",
            SavePolicy(save_experiment_best=0, save_trial_best=1, save_trial_latest=0),
        ),
    ],
)
def test_what_is_not_stated_is_a_masters_default_once_anything_is(
    section: str, policy: SavePolicy | None
) -> None:
    assert stated_policy(parse_yaml(f"checkpoint_storage: {section}", "mine.yaml")) == policy
    assert stated_policy(parse_yaml("name: mine", "mine.yaml")) is None


@pytest.mark.parametrize(
    ("key", "value", "said", "fix"),
    [
        ("save_trial_best", -1, "must be 0 or more", "e.g. 1"),
        ("save_trial_best", "2", "must be an integer, not a string", "e.g. 1"),
        ("save_trial_latest", True, "must be an integer", "e.g. 1"),
        ("save_trial_latest", 1.5, "must be an integer", "e.g. 1"),
        ("save_trial_bset", 1, "unknown key", "'save_trial_best'"),
        ("save_experiment_latest", 1, "unknown key", "save_"),
    ],
)
def test_what_is_no_number_of_checkpoints_is_refused(key: str, value: Any, said: str, fix: str) -> None:
    document = parse_yaml("name: mine", "mine.yaml").overwritten(("checkpoint_storage", key), value, "--set")
    problem = refusal(lambda: stated_policy(document))
    assert problem.key == f"checkpoint_storage.{key}"
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("section", "limit", "key"),
    [
        ("{save_trial_best: 2}", 5, "save_trial_best"),
        ("{save_experiment_best: 2}", 5, "save_experiment_best"),
        ("{save_trial_latest: 3}", 2, "save_trial_latest"),
        ("{save_trial_latest: 3}", 3, None),
        ("{save_trial_best: 1}", 1, None),
        ("{save_trial_best: 2}", None, None),
        ("{type: s3}", 1, None),
        ("{save_trial_best: x}", 1, None),
    ],
)
def test_a_limit_that_may_delete_more_is_a_warning(section: str, limit: int | None, key: str | None) -> None:
    """While training, only the best and the newest are sure to be kept."""
    problem = limit_problem(parse_yaml(f"checkpoint_storage: {section}", "mine.yaml"), limit)
    assert (problem.key if problem else None) == (key and f"checkpoint_storage.{key}")
