"""Keys that came after Determined 0.38.1: taken by a master that knows them, refused by an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.checked import Found, report_of

KEY = "resources.prefer_gpu_topology"


def found(folder: Path, value: Any, version: str = "0.42.0", **resources: Any) -> list[Found]:
    section = {"slots_per_trial": 2, "prefer_gpu_topology": value, **resources}
    report = report_of(folder, options=("--determined-version", version), resources=section)
    every: list[Found] = report["findings"]
    return every


@pytest.mark.parametrize("value", ["soft", "strong", False])
def test_a_master_that_knows_a_key_takes_its_values_and_an_older_one_takes_none(
    tmp_path: Path, value: Any
) -> None:
    assert found(tmp_path, value) == []
    for older in ("0.38.1", "0.40.0", "0.41.1"):
        (only,) = found(tmp_path, value, older)
        assert (only.severity, only.key, only.code) == ("error", KEY, "determined-version")
        assert f"needs Determined 0.42.0 or newer, and this is checked for {older}" in only.message
        assert "--determined-version 0.42.0" in only.fix


@pytest.mark.parametrize("value", [True, "on", 1, ["soft"]])
def test_other_values_are_refused(tmp_path: Path, value: Any) -> None:
    """``true`` is none, so that it never means one of the modes."""
    (only,) = found(tmp_path, value)
    assert (only.key, only.fix) == (KEY, "use one of false, strong, soft")


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [("0.50", 0, "is newer than 0.42.0"), ("0.37.2", 2, "0.38.1 or newer"), ("newest", 2, "0.38.1 or newer")],
)
def test_the_version_is_one_of_determineds(tmp_path: Path, version: str, code: int, said: str) -> None:
    report_of(tmp_path)
    done = CliRunner().invoke(main, ["check", str(tmp_path / "a.yaml"), "--determined-version", version])
    assert done.exit_code == code
    assert said in done.stderr


def test_without_one_the_installed_version_is_meant(tmp_path: Path) -> None:
    assert report_of(tmp_path, resources={"slots_per_trial": 2, "prefer_gpu_topology": "soft"})["findings"]
