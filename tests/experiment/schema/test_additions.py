"""Keys that came after Determined 0.38.1: taken by a master that knows them, refused by an older one."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from packaging.version import Version

from determined_ds.cli.main import main
from determined_ds.config.keys import RUN, ignored_keys
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.additions import ADDITIONS, NEWEST, OLDEST, version_to_check
from determined_ds.experiment.experiment import read_experiment
from determined_ds.experiment.schema import experiment_problems
from determined_ds.experiment.schema.of_master import FOLDER

TEXT = """\
entrypoint: python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
searcher: {name: single, metric: loss}
resources:
  slots_per_trial: 2
  prefer_gpu_topology: %s
"""


def refused(value: str, version: str) -> list[Problem]:
    errors, warnings = experiment_problems(parse_yaml(TEXT % value, "a.yaml"), version)
    assert warnings == []
    return errors


@pytest.mark.parametrize("value", ["soft", "strong", "false", "null"])
def test_a_master_that_knows_a_key_takes_its_values_and_an_older_one_takes_none(value: str) -> None:
    assert refused(value, "0.42.0") == []
    for older in ("0.38.1", "0.40.0", "0.41.1"):
        (problem,) = refused(value, older)
        assert (problem.key, problem.code) == ("resources.prefer_gpu_topology", "determined-version")
        assert problem.origin == "a.yaml:5"
        assert f"needs Determined 0.42.0 or newer, and this is checked for {older}" in problem.message
        assert "--determined-version 0.42.0" in problem.fix


@pytest.mark.parametrize("value", ["true", "'on'", "1", "[soft]"])
def test_other_values_are_refused(value: str) -> None:
    """``true`` is none, so that it never means one of the modes."""
    (problem,) = refused(value, "0.42.0")
    assert problem.message.startswith("must be one of false, strong, soft")
    assert problem.fix == "use one of false, strong, soft"


def test_the_rest_of_the_configuration_is_judged_all_the_same() -> None:
    errors, _ = experiment_problems(parse_yaml(TEXT % "soft" + "  max_slotz: 3\n", "a.yaml"), "0.42.0")
    assert [problem.key for problem in errors] == ["resources.max_slotz"]
    assert experiment_problems(Document(name="a", data={"resources": 3}), "0.42.0")[0]


def test_a_run_here_knows_the_key_and_says_that_it_is_for_clusters() -> None:
    document = parse_yaml(TEXT % "soft", "a.yaml")
    assert read_experiment(document)[1] == []
    (warning,) = ignored_keys(document, RUN)
    assert "resources.prefer_gpu_topology" in warning.message


@pytest.mark.parametrize("row", ADDITIONS, ids=lambda row: row.key)
def test_a_row_is_new_to_a_section_of_the_oldest_version(row: object) -> None:
    section, _, name = row.key.rpartition(".")  # type: ignore[attr-defined]
    assert name not in json.loads((FOLDER / f"{section}.json").read_text())["properties"]
    assert Version(OLDEST) < Version(row.since) <= Version(NEWEST)  # type: ignore[attr-defined]


def test_the_installed_version_is_meant_unless_another_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, meant in (("0.38.1", "0.38.1"), ("0.42.0", "0.42.0"), ("0.37.0", OLDEST), ("?", OLDEST)):
        monkeypatch.setattr(
            "determined_ds.experiment.additions.metadata.version", lambda _, found=installed: found
        )
        assert version_to_check(None) == meant
    assert version_to_check("0.41.0") == "0.41.0"
    for wrong in ("0.37.2", "newest"):
        with pytest.raises(ConfigError, match=r"must be a version of Determined, 0\.38\.1 or newer"):
            version_to_check(wrong)


def test_check_takes_the_version(tmp_path: object) -> None:
    path = tmp_path / "a.yaml"  # type: ignore[operator]
    path.write_text(
        (TEXT % "soft").replace("-m determined_ds.train model_defs.gpt2.trial:GPT2Trial", "train.py")
    )
    (tmp_path / "train.py").touch()  # type: ignore[operator]
    codes = {
        version: CliRunner().invoke(main, ["check", str(path), "--determined-version", version])
        for version in ("0.38.1", "0.42.0", "0.50", "0.1")
    }
    assert {version: done.exit_code for version, done in codes.items()} == {
        "0.38.1": 2,
        "0.42.0": 0,
        "0.50": 0,
        "0.1": 2,
    }
    assert "is newer than 0.42.0" in codes["0.50"].stderr
