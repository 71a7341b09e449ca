"""Determined's own launcher of DeepSpeed is warned of where it has to reach another machine."""

from __future__ import annotations

import pytest

from determined_ds.documents.reading import parse_yaml
from determined_ds.experiment.launcher import launcher_problems

DETERMINEDS = "python3 -m determined.launch.deepspeed python3 -m determined_ds.train trial:One"


@pytest.mark.parametrize(
    ("entrypoint", "resources", "is_told"),
    [
        (DETERMINEDS, "{slots_per_trial: 9}", True),
        (DETERMINEDS.split(), "{slots_per_trial: 16}", True),
        (DETERMINEDS, "{slots_per_trial: 16, is_single_node: true}", False),
        (DETERMINEDS, "{slots_per_trial: 8}", False),
        (DETERMINEDS, "{}", False),
        (DETERMINEDS.replace("determined.launch", "determined_ds.launch"), "{slots_per_trial: 16}", False),
        (DETERMINEDS.replace("deepspeed", "torch_distributed"), "{slots_per_trial: 16}", False),
    ],
)
def test_it_is_warned_of_where_a_trial_spans_machines(
    entrypoint: str | list[str], resources: str, is_told: bool
) -> None:
    document = parse_yaml(f"entrypoint: {entrypoint}\nresources: {resources}\n", "mine.yaml")
    problems = launcher_problems(document)
    assert [problem.code for problem in problems] == ["launcher-machines"] * is_told
    for problem in problems:
        assert problem.origin == "mine.yaml:1"
        assert "determined_ds.launch.deepspeed" in problem.fix
