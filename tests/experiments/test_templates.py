"""Every template is what it says: the master takes it, it reconciles, and it runs through the real entry."""

from __future__ import annotations

import ast
import base64
import math
from pathlib import Path

import pytest
from determined.common import context, util

from tests.harness.checked import reports
from tests.harness.command import ROOT, det_ds
from tests.package import DS_CONFIGS, EXPERIMENTS, LOG_POLICIES, records

TEMPLATES = [str(path.relative_to(ROOT)) for path in EXPERIMENTS]
JSONS = [str(path.relative_to(ROOT)) for path in DS_CONFIGS]
# The second of the comments at the top says what a template needs.
RUN_ANYWHERE = [path for path in TEMPLATES if "CPU" in (ROOT / path).read_text().splitlines()[1]]
# Every strategy with one model, and every model with one strategy.
RUN_HERE = [path for path in RUN_ANYWHERE if "/gpt2/" in path or path.endswith("/const.yaml")]


@pytest.mark.parametrize("path", TEMPLATES)
def test_what_no_restart_can_help_ends_at_the_first_start_and_labels_name_it(path: str) -> None:
    """The policies say what ``determined_ds.cluster.log`` prints, word for word."""
    config = util.safe_load_yaml_with_exceptions((ROOT / path).read_text())
    assert config["log_policies"] == list(LOG_POLICIES)
    assert config["labels"][:2] == [Path(path).parent.name, "deepspeed"]
    assert len(config["labels"]) >= 3


@pytest.mark.parametrize(
    ("path", "accelerator"),
    [*((path, "cpu") for path in RUN_ANYWHERE), *((path, "cuda") for path in (*TEMPLATES, *JSONS))],
)
def test_it_checks_clean(path: str, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point of it, without a warning."""
    monkeypatch.chdir(ROOT)
    for report in reports(path, "--accelerator", accelerator):
        assert report["findings"] == []
        assert report["points"]["runnable"] == report["points"]["checked"]


@pytest.mark.parametrize("path", RUN_HERE)
def test_it_runs(path: str, tmp_path: Path) -> None:
    done = det_ds("run", path, ".", "--test", "--run-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "test passed: trained, validated, saved, loaded back" in done.stdout
    for group in ("training", "validation"):
        losses = [
            next(value for name, value in metrics.items() if name.endswith("loss"))
            for _, metrics in records(tmp_path, group)
        ]
        assert losses
        assert all(math.isfinite(loss) for loss in losses)


def sent_from(folder: Path) -> dict[str, int]:
    """The files that `det experiment create CONFIG folder` sends, and their sizes in bytes."""
    files = context.read_v1_context(folder)
    return {file.path: len(base64.b64decode(file.content or "")) for file in files if file.type == ord("0")}


def test_what_the_cluster_gets() -> None:
    sent = sent_from(ROOT)
    # a file of data would be more
    assert (sum(sent.values()) < 1.5e6, len(sent) <= 200) == (True, True)
    only_here = ("script", "train/shape", "launch/run", "report/run_page")
    assert all((ROOT / f"determined_ds/{name}.py").is_file() for name in only_here)
    assert not {f"determined_ds/{name}.py" for name in only_here} & sent.keys()
    folders = {path.split("/")[0] for path in sent if "/" in path}
    assert folders == {"determined_ds", "experiments", "model_defs"}
    assert {*JSONS, "startup-hook.sh", "setup.cfg", "constraints.txt"} <= set(sent)
    assert not {*TEMPLATES} & set(sent)  # each is sent beside it


MEASURE = ROOT / "determined_ds/doctor/measure.py"  # doctor --measure needs the package in the image


def modules_loaded_by(module: str) -> set[Path]:
    """The files of this library that a module may load, wherever in it an import stands."""
    found: set[Path] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        path = ROOT.joinpath(*name.split("."))
        candidates = (path.with_suffix(".py"), path / "__init__.py", path / "__main__.py")
        files = [file for file in candidates if file.is_file()]
        if name.startswith("determined_ds.") and files and not found.union([MEASURE]).issuperset(files):
            found.update(files)
            for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
                if isinstance(node, ast.Import):
                    todo += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize(
    ("module", "least"),
    [("determined_ds.train", 50), ("determined_ds.cluster.startup", 20), ("determined_ds.doctor", 20)],
)
def test_the_cluster_gets_every_module_that_a_task_may_load(module: str, least: int) -> None:
    """Of a rank, of the start-up hook, and of a doctor that is asked there."""
    needed = {str(file.relative_to(ROOT)) for file in modules_loaded_by(module)}
    assert len(needed) > least
    assert needed <= set(sent_from(ROOT))


def test_what_the_cluster_does_not_get(tmp_path: Path) -> None:
    """Neither tests, runs, environments and caches nor secrets, wherever they lie."""
    (tmp_path / ".detignore").write_text((ROOT / ".detignore").read_text())
    wanted = ["determined_ds/train/__main__.py", "model_defs/mine/trial.py", "experiments/mine/zero1.json"]
    unwanted = [
        "experiments/mine/const.yaml",
        *("tests/test_a.py", "runs/gpt2/1/metrics.jsonl", "experiments/runs/1/checkpoint.pt", "data.bin"),
        *(".venv/lib/torch.so", ".git/HEAD", "determined_ds.egg-info/PKG-INFO", "experiments/id_rsa"),
        *("determined_ds/__pycache__/a.pyc", "model_defs/mine/.env", "model_defs/mine/server.pem"),
    ]
    for name in (*wanted, *unwanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sorted(sent_from(tmp_path)) == sorted(wanted)
