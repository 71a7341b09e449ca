"""Versions of what is installed: against what determined-ds asks for, with what was tested beside it."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from determined_ds.doctor import versions
from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.imports import check_imports
from determined_ds.doctor.surroundings import Host
from determined_ds.doctor.versions import check_versions, fits, requirements
from tests.command import ROOT


def as_if_installed(folder: Path, name: str, version: str) -> None:
    """The account of a distribution, found before the one that is really there."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def look(context_dir: Path = ROOT) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in check_versions(context_dir)}


def test_this_environment_is_in_order() -> None:
    found = look()
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert {"python", "torch", "deepspeed", "determined", "transformers", "pydantic"} <= found.keys()
    assert found["torch"].needed == f">=2.6 (tested: {versions.tested_versions(ROOT)['torch']})"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.6.0", "ok"),
        ("2.13.0+cu130", "ok"),
        ("2.7.0a0+ecf3bae40a", "ok"),
        ("2.6.0a0+df5bbc09d1.nv24.11", "warning"),  # sorts below 2.6
        ("2.3.0a0+40ec155e58", "missing"),  # of Determined's default image
        ("2.5.1", "missing"),
    ],
)
def test_torch_is_new_enough_or_nearly(version: str, state: str) -> None:
    assert fits(Requirement("torch>=2.6"), version) == state


def test_a_beta_of_another_package_is_not_taken_for_its_release() -> None:
    assert fits(Requirement("deepspeed>=0.19.8"), "0.19.8rc1") == "missing"


def test_what_is_too_old_or_absent_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_installed(tmp_path, "torch", "2.3.0a0+40ec155e58")
    as_if_installed(tmp_path, "determined", "0.50.0")
    as_if_installed(tmp_path, "transformers", "4.40.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = look()
    wrong = {name: each.state for name, each in found.items() if each.state != "ok"}
    assert wrong == {"torch": "missing", "determined": "missing", "transformers": "warning"}
    assert found["torch"].found == "2.3.0a0+40ec155e58"
    assert "docker build -f docker/Dockerfile" in found["torch"].fix
    assert found["transformers"].fix.startswith("pip install 'transformers>=5'")
    monkeypatch.setattr(versions, "installed_version", lambda name: None if name == "peft" else "99")
    assert look()["peft"].found == "not installed"


def test_beside_an_installed_package_its_metadata_says_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is neither setup.cfg nor constraints.txt then; a task has both in its context directory."""
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    if metadata.requires("determined-ds") is None:
        pytest.skip("determined-ds is not installed in this environment")
    names = {requirement.name: optional for requirement, optional in requirements(tmp_path)}
    assert (names["torch"], names["transformers"]) == (False, True)
    assert "pytest" not in names
    assert versions.tested_versions(tmp_path) == {}
    for name in ("setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert versions.tested_versions(tmp_path)["deepspeed"] == "0.19.8"
    assert {name.name for name, _ in requirements(tmp_path)} >= {"torch", "peft"}


# ------------------------------------------------------------------------------------- what imports


def test_a_broken_torch_is_one_finding_and_hides_no_other(tmp_path: Path) -> None:
    """A folder of the context directory comes before the package: this one is broken, that one another version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "raise OSError('libcudart.so.13: cannot open shared object file')"
    )
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("__version__ = '0.14.0'\nprint('hello')\n")
    torch, findings = check_imports(Host(working_dir=tmp_path))
    assert torch.error.startswith("OSError: libcudart.so.13")
    found = {finding.name: finding for finding in findings}
    assert (found["torch import"].state, found["deepspeed import"].state) == ("missing", "warning")
    assert found["deepspeed import"].found.startswith(
        f"imports 0.14.0 from {tmp_path}/deepspeed/__init__.py, and "
    )


def test_an_interpreter_that_crashes_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    torch, (finding,) = check_imports(Host(working_dir=tmp_path))
    assert (finding.name, finding.state) == ("torch import", "missing")
    assert torch.error
