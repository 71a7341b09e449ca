"""What DeepSpeed compiles, by what, and what is looked for before ranks start: nvcc."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from determined_ds import ConfigError
from tests.harness.command import ROOT
from tests.harness.task import trial
from tests.package import (
    CPU,
    CUDA,
    NO_RESTART_HELPS,
    before_ranks,
    built_by,
    decide,
    prepared_by_run,
    refused_by_task,
)


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}


ADAM, TORCHS = optimizer("AdamW", torch_adam=False), optimizer("AdamW", torch_adam=True)
OFFLOAD, ZEROPP = zero(2, offload_optimizer={"device": "cpu"}), zero(3, zero_quantized_weights=True)
NVME = zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"})


@pytest.mark.parametrize(
    ("ds", "on_cuda", "on_cpu"),
    [
        ({**TORCHS, **zero(1)}, {}, {}),
        ({**ADAM, **zero(1)}, {"fused_adam": "nvcc"}, {"fused_adam": "c++"}),
        ({**ADAM, **OFFLOAD}, {"cpu_adam": "c++"}, {"cpu_adam": "c++"}),
        ({**TORCHS, **ZEROPP}, {"quantizer": "nvcc"}, None),
        ({**ADAM, **NVME}, {"cpu_adam": "c++", "async_io": "nvcc"}, {"cpu_adam": "c++", "async_io": "c++"}),
    ],
)
def test_what_a_configuration_has_built_and_by_what(
    ds: dict[str, Any], on_cuda: dict[str, str], on_cpu: dict[str, str] | None
) -> None:
    """None: it is refused there."""
    assert built_by(decide(ds=ds, accelerator=CUDA)) == on_cuda
    if on_cpu is not None:
        assert built_by(decide(ds=ds, accelerator=CPU)) == on_cpu


@pytest.mark.parametrize(
    ("cuda", "torch", "fits"),
    [
        ("13.0", "13.0", True),
        ("13.1", "13.0", False),  # DeepSpeed lets the minors of 12 mix, and none of 13
        ("12.6", "12.8", True),
    ],
)
def test_nvcc_is_of_the_cuda_of_torch(tmp_path: Path, cuda: str, torch: str, fits: bool) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {cuda}, V{cuda}.88'\n")
    (home / "bin/nvcc").chmod(0o755)
    resolved = decide(ds={**ADAM, **zero(1)}, accelerator=CUDA)
    shared = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    by_home = {**shared, "PATH": "/usr/bin:/bin", "CUDA_HOME": str(home)}
    by_path = {**shared, "PATH": f"{home}/bin:/usr/bin:/bin"}
    for environment in (by_home, by_path):
        with (
            contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="torch is built for CUDA")
        ):
            before_ranks(resolved, environment, torch_cuda=torch)
    before_ranks(resolved, {**by_home, "DS_SKIP_CUDA_CHECK": "1"}, torch_cuda=torch)


def test_what_is_compiled_for_gpus_is_refused_without_nvcc_by_a_run_and_by_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the place of the key, before the minutes that ranks take to find out; what torch brings needs none."""
    if Path("/usr/local/cuda").exists():
        pytest.skip("this machine has a CUDA toolkit where torch looks")
    for name in ("PATH", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    plus_plus = "hyperparameters.deepspeed_config=experiments/deepspeed/zeropp.json"
    words = [str(ROOT / "experiments/gpt2/const.yaml"), str(ROOT), "--run-dir", str(tmp_path / "run")]
    done = prepared_by_run([*words, "--set", plus_plus], CUDA)
    assert done.exit_code == 2, done.output
    assert "zero_quantized_weights = true" in done.stderr
    assert "fix: set zero_quantized_weights to false; or install the CUDA toolkit" in done.stderr
    assert not (tmp_path / "run").exists()
    assert refused_by_task(trial({"deepspeed_config": ZEROPP}), slots=2, accelerator=CUDA) == 2
    *reasons, last = capsys.readouterr().err.splitlines()
    assert last == NO_RESTART_HELPS
    assert reasons[0].startswith("ERROR: zero_optimization.zero_quantized_weights = true")
    for fine in (zero(3), {**ADAM, **OFFLOAD}):
        assert refused_by_task(trial({"deepspeed_config": fine}), slots=2, accelerator=CUDA) is None
