"""``startup-hook.sh`` in the context that a task gets: it installs what the image lacks, and nothing else."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from determined.common import context

from determined_ds import __version__
from tests.cluster.http import Fault
from tests.cluster.master import create, still_master
from tests.harness.command import ROOT, TIMEOUT_S
from tests.harness.task import BAD_BATCH, ON_TWO, trial
from tests.package import NO_RESTART_HELPS

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

LIGHT = "attrdict3"
LOST = ("attrdict", LIGHT)  # what begins the names of its files
GOES_ON = "set -e; set -x; source startup-hook.sh; echo went on"
Hook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def context_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``det experiment create CONFIG .`` sends, as a task unpacks it."""
    folder = tmp_path_factory.mktemp("context")
    for file in context.read_v1_context(ROOT):
        if file.type == ord("0"):
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(file.content or ""))
    return folder


@pytest.fixture
def hook(context_dir: Path, tmp_path: Path) -> Hook:
    """``hook(image=..., script=..., **environment)``: run the hook as a task does, without a way to any index."""

    def run(
        image: Path = Path(sys.prefix), script: str = "source startup-hook.sh", **environment: str | Path
    ) -> subprocess.CompletedProcess[str]:
        kept = {"HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CACHE_DIR": str(tmp_path / "cache")}
        env = {**kept, "PATH": f"{image}/bin:/usr/bin:/bin", **{k: str(v) for k, v in environment.items()}}
        how = {"cwd": context_dir, "env": env, "timeout": TIMEOUT_S}
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, **how)  # type: ignore[call-overload, no-any-return]

    return run


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder for ``PYTHONPATH``: what lies in it stands for what the image has. Its pip starts nothing."""
    folder = tmp_path / "first"
    as_if_importable(folder, "pip", "")
    (folder / "pip/__main__.py").write_text("import sys; sys.exit('pip was started')\n")
    return folder


def as_if_importable(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


def as_if_installed(folder: Path, name: str, version: str) -> None:
    """The account of a distribution, that is found before the one which is really there."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_ranks_find_the_library_of_the_context_and_their_variables(
    hook: Hook, first: Path, context_dir: Path, tmp_path: Path
) -> None:
    """Though the image has another version of it, which does not even import, and Python looks beside a script only."""
    as_if_importable(first, "determined_ds", "raise ImportError('of the image')\n")
    as_if_installed(first, "determined_ds", "0.0.1")
    (tmp_path / "train.py").write_text("import determined_ds as ds; print(ds.__version__, ds.__file__)\n")
    say = f"cd /; python3 {tmp_path}/train.py; bash -c 'echo $LOCAL_SIZE ${{OMP_NUM_THREADS:+stated}}'"
    script = f"set -euo pipefail; source startup-hook.sh; {say}"
    done = hook(script=script, PYTHONPATH=first, **ON_TWO, **trial())
    library = f"{__version__} {context_dir}/determined_ds/__init__.py\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{library}2 stated\n", "")


def test_what_cannot_run_is_refused_before_the_ranks_start(hook: Hook, first: Path) -> None:
    """As the last lines of the task's log, although Determined has the shell trace its commands; it needs no torch."""
    for name in ("torch", "deepspeed", "determined"):
        as_if_importable(first, name, "raise ImportError('is not needed')\n")
    done = hook(script=GOES_ON, PYTHONPATH=first, **ON_TWO, **trial(BAD_BATCH))
    assert (done.returncode, done.stdout) == (2, "")
    reason, last = done.stderr.splitlines()[-2:]
    assert reason.startswith("ERROR: hyperparameters.global_batch_size = 9 ")
    assert reason.endswith("; fix: use global_batch_size 8 or 10")
    assert last == NO_RESTART_HELPS


def test_a_point_of_a_search_is_dropped_and_that_is_no_failure(hook: Hook) -> None:
    """The master takes the early exit; its answer is lost, and it is told again."""
    task = trial(BAD_BATCH, {"searcher": {"name": "grid", "metric": "validation_loss"}})
    with still_master() as master:
        [dropped] = create(master, json.loads(task["DET_EXPERIMENT_CONFIG"])).trials
        exits = f"/api/v1/trials/{dropped.id}/early_exit"
        master.server.faults.append(Fault(kind="close after", method="POST", path=exits))
        task |= {
            "DET_MASTER": master.server.url,
            "DET_SESSION_TOKEN": dropped.allocations[0].token,
            "DET_TRIAL_ID": str(dropped.id),
            "DET_USER": "somebody",
        }
        done = hook(script=GOES_ON, **ON_TWO, **task)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert dropped.invalid_hp
        assert [call.status for call in master.server.calls if call.path == exits] == [None, 200]
    said = "WARNING: this point cannot run, and is dropped: hyperparameters.global_batch_size = 9 "
    assert said in done.stderr


# ------------------------------------------------------------------------------------------- of an image


def write_wheel(folder: Path, version: str) -> None:
    """An ``attrdict3`` of a version."""
    info = f"{LIGHT}-{version}.dist-info"
    files = {
        "attrdict/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {LIGHT}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{LIGHT}-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def test_what_is_missing_is_installed_as_it_was_tested_and_nothing_else_changes(
    hook: Hook, tmp_path: Path
) -> None:
    """Of an environment with all that this one has, but for ``attrdict3``; though a newer one is to be had."""
    pytest.importorskip("pip")
    image = tmp_path / "image"
    venv.create(image, with_pip=False, symlinks=True)
    [there] = image.glob("lib/python*/site-packages")
    for path in map(Path, sys.path):
        for entry in path.iterdir() if path.name in ("site-packages", "dist-packages") else ():
            if not entry.name.startswith(LOST) and not (there / entry.name).exists():
                (there / entry.name).symlink_to(entry)

    def installed() -> dict[str, str]:
        return {each.metadata["Name"]: each.version for each in metadata.distributions(path=[str(there)])}

    [pinned] = [line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith(LIGHT)]
    tested = pinned.removeprefix(f"{LIGHT}==")
    for version in (tested, "99.0"):
        write_wheel(tmp_path, version)
    before = installed()
    script = "set -e; source startup-hook.sh; python3 -c 'import attrdict'"
    done = hook(image, script=script, PIP_FIND_LINKS=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert installed() == {**before, LIGHT: tested} != before
    again = hook(image, script=script)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "version", "needed"),
    [  # torch is built for its CUDA, and determined comes with the cluster: they are not replaced
        ("torch", "2.3.0a0+40ec155e58", "determined_ds needs torch>=2.6, "),
        ("torch", "2.6.0a0+df5bbc09d1.nv24.11", ""),  # NVIDIA's, from before 2.6.0, and sorted below 2.6
        (LIGHT, "1.0", f"could not install {LIGHT}>=2.0.2 "),
    ],
)
def test_an_image_that_does_not_fit_is_refused(
    hook: Hook, first: Path, name: str, version: str, needed: str
) -> None:
    """The trial is not started, also by a shell that does not mind errors."""
    as_if_installed(first, name, version)
    done = hook(script="set +e; source startup-hook.sh; echo went on", PYTHONPATH=first)
    assert (done.returncode, "went on" in done.stdout) == ((1, False) if needed else (0, True))
    if needed:
        assert f"ERROR: startup-hook: {needed}" in done.stderr
        assert version in done.stderr
    else:
        assert done.stderr == ""
