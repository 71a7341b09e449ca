"""``environment.environment_variables`` as the ranks of a device get them."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.experiment.variables import Variables, names_of, variables_for


def variables(given: Any, device: str = "cpu") -> Variables:
    document = Document(name="e.yaml", data={"environment": {"environment_variables": given}})
    return variables_for(document, device)


def test_a_list_is_for_every_device() -> None:
    assert variables(["A=1", "B=x=y", "C=", "D"]).values == {"A": "1", "B": "x=y", "C": "", "D": None}


def test_a_mapping_has_a_list_for_each_device() -> None:
    given = {"cpu": ["A=cpu"], "cuda": ["A=cuda"], "rocm": ["A=rocm"], "gpu": None}
    assert variables(given, "cpu").values == {"A": "cpu"}
    assert variables(given, "cuda").values == {"A": "cuda"}
    assert variables({"gpu": ["A=old"]}, "cuda").values == {"A": "old"}
    assert variables({"gpu": ["A=old"]}, "cpu").values == {}


def test_none_are_asked_for() -> None:
    assert variables(None).values == {}
    assert variables_for(Document(name="e.yaml", data={}), "cpu").values == {}


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "DET_MASTER", "CUDA_VISIBLE_DEVICES", "LOCAL_SIZE"])
def test_what_the_launch_sets_is_said_and_not_used(name: str) -> None:
    found = variables([f"{name}=secret", "A=1"])
    assert found.values == {"A": "1"}
    [warning] = found.warnings
    assert f"environment_variables.0 (e.yaml): {name} is set by the launch" in str(warning)
    assert "secret" not in str(warning)


def test_all_that_is_wrong_is_said_at_once_and_no_value_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        variables(["=secret", {"A": "secret"}, 7])
    told = str(caught.value)
    assert told.count("fix: write e.g.") == 3
    assert "secret" not in told
    with pytest.raises(ConfigError, match="must be a list of NAME=VALUE, not a string"):
        variables("A=1")
    with pytest.raises(ConfigError, match=r"environment_variables\.tpu .*: unknown key"):
        variables({"tpu": ["A=1"]})


def test_names_alone() -> None:
    given = {"cpu": ["B=1"], "cuda": ["A=1"]}
    assert names_of({"environment": {"environment_variables": given}}) == ["cpu B", "cuda A"]
    assert names_of({"environment": {"environment_variables": ["B=1", "A=2"]}}) == ["A", "B"]
    assert names_of({}) == []
