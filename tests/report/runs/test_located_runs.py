"""A folder is a run, or holds runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.errors import ConfigError
from determined_ds.report.runs.located_runs import find_runs, read_runs
from tests.report.recorded import recorded


def test_of_a_search_a_comparison_and_a_folder_of_runs(tmp_path: Path) -> None:
    search = recorded(tmp_path / "search")  # a search has an experiment.yaml too
    trials = [recorded(search / "trials" / f"000{number}") for number in (1, 2)]
    compared = [recorded(tmp_path / "compare" / "runs" / name / "1") for name in ("zero0-x2", "zero1-x2")]
    plain = [recorded(tmp_path / "runs" / name) for name in ("a", "b")]
    assert find_runs([search]) == trials
    assert find_runs([tmp_path / "compare"]) == compared
    assert find_runs([tmp_path / "runs"]) == plain
    assert find_runs([plain[1], search, plain[1]]) == [plain[1], *trials]
    assert [each.label for each in read_runs(trials)] == ["trial 1", "trial 2"]
    assert [each.label for each in read_runs(compared)] == ["zero0-x2/1", "zero1-x2/1"]
    assert [each.label for each in read_runs(plain)] == ["a", "b"]


def test_each_folder_that_holds_none_is_named_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        find_runs([tmp_path / name for name in ("file", "empty", "nowhere")])
    assert [each.message for each in caught.value.problems] == [
        "is not a folder",
        "holds no run",
        "does not exist",
    ]
    assert all("det-ds run" in each.fix for each in caught.value.problems)
