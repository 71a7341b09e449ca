"""``det-ds new`` writes what runs as it is."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.command import ROOT, det_ds
from tests.package import check

KINDS = ("data-parallel", "pipeline", "two-engine")

MODELS = sorted(
    file.parent.name for stem in ("trial", "train") for file in (ROOT / "model_defs").glob(f"*/{stem}.py")
)


def new(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["new", *arguments, "-o", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("options", [*(("--kind", kind) for kind in KINDS), ("--from", "vit")])
def test_it_runs_at_once(options: tuple[str, str], tmp_path: Path) -> None:
    said = new(tmp_path, "mine", *options)
    assert str(tmp_path / "experiments/mine/const.yaml") in said
    arguments = ["run", "experiments/mine/const.yaml", ".", "--test", "--run-dir", tmp_path / "run"]
    done = det_ds(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test passed: " in done.stdout
    assert (tmp_path / ".detignore").read_text() == "runs/\n"  # where a run is written by default


def test_what_it_writes_passes_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        new(tmp_path, f"my_{kind.replace('-', '_')}", "--kind", kind)
    for model in MODELS:
        new(tmp_path, f"my_{model}", "--from", model)
    files = [*Path("experiments").glob("*/*.yaml"), *Path("experiments").glob("*/*.json")]
    assert [found for report in check(files) for found in report.findings if found.severity == "error"] == []


def test_a_copy_has_its_own_names_and_all_that_it_imports(tmp_path: Path) -> None:
    """And nothing of the example that it is a copy of: it may be missing, or of another version."""
    for model in MODELS:
        folder = tmp_path / model
        new(folder, "mine", "--from", model)
        modules = {".".join(file.relative_to(folder).with_suffix("").parts) for file in folder.rglob("*.py")}
        for file in folder.rglob("*.py"):
            for module in re.findall(r"^\s*(?:from|import) (model_defs[.\w]*)", file.read_text(), re.M):
                assert module in modules or f"{module}.__init__" in modules, (file, module)
        for file in folder.glob("experiments/mine/*.yaml"):
            data = yaml.safe_load(file.read_text())
            assert data["name"].startswith("mine_")
            assert re.search(r" model_defs\.mine\.(trial:|train$)", data["entrypoint"])
            assert (folder / data["hyperparameters"]["deepspeed_config"]).is_file()
            assert model not in {data["name"], *data["labels"]}


def test_a_wheel_has_every_experiment() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {Path(key).name for key in setup["options.data_files"]}
    assert folders == {folder.name for folder in (ROOT / "experiments").iterdir() if folder.is_dir()}


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    new(tmp_path, "mine")
    trial = tmp_path / "model_defs/mine/trial.py"
    trial.write_text("mine\n")
    result = CliRunner().invoke(main, ["new", "mine", "-o", str(tmp_path)])
    assert (result.exit_code, "--force" in result.output) == (2, True)
    assert trial.read_text() == "mine\n"
    new(tmp_path, "mine", "--force")
    assert trial.read_text() != "mine\n"
    result = CliRunner().invoke(main, ["new", "My-Model", "-o", str(tmp_path)])
    assert (result.exit_code, "is not a valid package name" in result.output) == (2, True)
