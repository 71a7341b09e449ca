"""``det-ds run`` and the start-up hook look before ranks start: for nvcc on GPUs, and for locks of killed builds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds import Accelerator, startup
from determined_ds.cli.main import main
from determined_ds.cluster_log import NO_RESTART_HELPS
from determined_ds.launch import prepare as local_run
from tests.harness.command import ROOT
from tests.harness.task import trial

GPUS = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)
ON_HOST = "hyperparameters.overwrite_deepspeed_args.optimizer.params.torch_adam=false"


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with GPUs and without nvcc."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if Path("/usr/local/cuda").exists():
        pytest.skip("this machine has a CUDA toolkit where torch looks")
    monkeypatch.setattr(local_run, "detect_accelerator", lambda _: GPUS)
    monkeypatch.setattr(startup, "detect_without_torch", lambda _: GPUS)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What a build leaves that was killed yesterday."""
    path = tmp_path / "extensions/py311_cu130/cpu_adam/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - 86400,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return path


def task(ds_config: dict[str, Any]) -> dict[str, str]:
    return trial({"deepspeed_config": ds_config})


@pytest.mark.usefixtures("no_toolkit")
def test_a_run_that_would_compile_for_gpus_is_refused_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["run", str(ROOT / "experiments/gpt2/zeropp.yaml"), str(ROOT), "--run-dir", str(run_dir)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    assert "zero_quantized_weights = true" in done.stderr
    assert "DeepSpeed compiles quantizer for it by nvcc at its first use, and there is no nvcc" in done.stderr
    assert not run_dir.exists()


@pytest.mark.usefixtures("no_toolkit")
def test_so_is_a_task_and_it_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    ds = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    assert startup.refused(task(ds), slots=2) == 2
    *reasons, last = capsys.readouterr().err.splitlines()
    assert last == NO_RESTART_HELPS
    assert "by nvcc" in reasons[0]
    assert reasons[0].startswith("ERROR: zero_optimization.zero_quantized_weights = true")
    assert startup.refused(task({"zero_optimization": {"stage": 3}}), slots=2) is None


def test_a_run_that_builds_removes_the_lock_of_a_killed_build_and_says_so(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run.LocalRun, "launch", lambda *_, **__: 0)
    words = ["run", str(ROOT / "experiments/gpt2/const.yaml"), str(ROOT), "--accelerator", "cpu", "--run-dir"]
    done = CliRunner().invoke(main, [*words, str(tmp_path / "a")])
    assert (done.exit_code, lock.exists()) == (0, True), done.output
    done = CliRunner().invoke(main, [*words, str(tmp_path / "b"), "--set", ON_HOST])
    assert (done.exit_code, lock.exists()) == (0, False), done.output
    assert f"warning: removed {lock}, the lock of a build that was killed" in done.stderr


def test_so_does_a_task(
    lock: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ds = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}
    assert startup.refused(task(ds), slots=2) is None
    said = capsys.readouterr()
    assert said.err.startswith(f"WARNING: removed {lock}, ")
    assert said.out == ""  # the shell runs what is there
    assert not lock.exists()
