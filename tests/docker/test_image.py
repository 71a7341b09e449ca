"""``docker/Dockerfile``: linted, its install that of the Makefile, and the install run, as far as a test can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from determined_ds import __version__
from tests.harness.command import ROOT

DOCKERFILE = ROOT / "docker/Dockerfile"
PREFIX = "/opt/determined-ds"


def steps() -> list[dict[str, str]]:
    """The instructions, continued lines joined."""
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is of the dev extra")
    parser = parse.DockerfileParser(fileobj=DOCKERFILE.open("rb"))
    found: list[dict[str, str]] = parser.structure
    return [step for step in found if step["instruction"] != "COMMENT"]


def values(instruction: str) -> list[str]:
    return [step["value"] for step in steps() if step["instruction"] == instruction]


def install() -> str:
    (command,) = (value for value in values("RUN") if "pip" in value)
    return command


def test_what_it_copies_is_let_through_and_nothing_else_is() -> None:
    copied = {word for value in values("COPY") for word in value.split()[:-1]}
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert "*" in ignore
    assert all((ROOT / name).exists() for name in copied)
    assert {"model_defs", "experiments"} <= copied  # examples, for det-ds new --from


@pytest.mark.long("installs packages; what it installs and copies is proved by the tests before")
def test_its_install_runs_with_what_it_copies_and_takes_determineds_harness(tmp_path: Path) -> None:
    """Determined installs its harness with ``pip install --user`` at each task's start (0.38.1 ``task-setup.sh``)."""
    for value in values("COPY"):
        *names, target = value.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tmp_path / target)
    prefix = tmp_path / "opt"
    packages = sysconfig.get_path("purelib")
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": packages,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that setuptools is here
        "TORCH_INDEX": "",
    }

    def run(script: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-euo", "pipefail", "-c", script]
        kept = {**environment, **more}
        return subprocess.run(words, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=600)

    done = run(install().replace(PREFIX, str(prefix)))
    assert done.returncode == 0, done.stdout + done.stderr
    on_path = {"PATH": f"{prefix}/bin{os.pathsep}/usr/bin{os.pathsep}/bin"}
    assert f"PATH={PREFIX}/bin:${{PATH}}" in values("ENV")
    assert run("det-ds --version", **on_path).stdout == f"det-ds, version {__version__}\n"
    asked = run(f"cd {prefix}; python3 -c 'import determined_ds; print(determined_ds.__file__)'", **on_path)
    assert asked.stdout.startswith(str(prefix))

    copied = run("det-ds new mine --from bert --output copy", **on_path)
    assert (copied.returncode, (tmp_path / "copy/experiments/mine/const.yaml").is_file()) == (0, True), (
        copied.stderr
    )

    wheel = tmp_path / "harness-1.0-py3-none-any.whl"
    files = {
        "harness.py": "",
        "harness-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: harness\nVersion: 1.0\n",
        "harness-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "harness-1.0.dist-info/RECORD": "harness.py,,\nharness-1.0.dist-info/METADATA,,\n",
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    done = run(
        f"python3 -m pip install -q --user {wheel} && python3 -c 'import harness; print(harness.__file__)'",
        PYTHONUSERBASE=str(tmp_path / "userbase"),
        **on_path,
    )
    assert done.stdout.startswith(f"{tmp_path}/userbase/"), done.stdout + done.stderr
