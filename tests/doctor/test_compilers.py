"""The tools that DeepSpeed's extensions are built with: which a configuration needs, and whether they are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds import Accelerator
from determined_ds.doctor import before_ranks
from determined_ds.doctor.before_ranks import missing_compiler
from determined_ds.doctor.compilers import check_compilers
from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.extensions import ops_of
from determined_ds.doctor.surroundings import Host
from determined_ds.errors import Problem
from tests.doctor.programs import machine, nvcc
from tests.package import CPU, CUDA, decide

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}
TORCHS = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


OFFLOAD = zero(2, offload_optimizer={"device": "cpu"})
ZEROPP = zero(3, zero_quantized_weights=True)


# ------------------------------------------------------------------------------------- what is needed


@pytest.mark.parametrize(
    ("ds", "on_cuda", "on_cpu"),
    [
        ({**TORCHS, **zero(1)}, {}, {}),
        ({**ADAM, **zero(1)}, {"fused_adam": "nvcc"}, {"fused_adam": "c++"}),
        ({**ADAM, **OFFLOAD}, {"cpu_adam": "c++"}, {"cpu_adam": "c++"}),
        ({**TORCHS, **OFFLOAD}, {}, {}),
        ({**LION, **zero(1)}, {"fused_lion": "nvcc"}, None),
        ({**LION, **OFFLOAD}, {"cpu_lion": "c++"}, {"cpu_lion": "c++"}),
        ({**TORCHS, **ZEROPP}, {"quantizer": "nvcc"}, None),
        (
            {**ADAM, **zero(3, offload_optimizer=NVME)},
            {"cpu_adam": "c++", "async_io": "nvcc"},
            {"cpu_adam": "c++", "async_io": "c++"},
        ),
    ],
)
def test_what_a_configuration_has_built_and_by_what(
    ds: dict[str, Any], on_cuda: dict[str, str], on_cpu: dict[str, str] | None
) -> None:
    """None: it is refused there."""
    for accelerator, built in ((CUDA, on_cuda), (CPU, on_cpu)):
        if built is not None:
            found = {op.name: op.tools[0] for op in ops_of(decide(ds=ds, accelerator=accelerator))}
            assert found == built


# ------------------------------------------------------------------------------------- what is here


def look(here: Host, *tools: str, torch: str = "13.0", gpus: bool = True) -> dict[str, Diagnosis]:
    wanted = {tool: ["cpu_adam (zero_optimization.offload_optimizer)"] for tool in tools}
    return {each.name: each for each in check_compilers(here, wanted, torch_cuda=torch, has_gpus=gpus)}


@pytest.mark.parametrize(
    ("cuda", "torch", "state"),
    [
        ("13.0", "13.0", "ok"),
        ("13.1", "13.0", "missing"),  # DeepSpeed lets the minors of 12 mix, and none of 13
        ("12.6", "12.8", "ok"),
        ("11.8", "12.8", "missing"),
        ("13.0", "", "ok"),
    ],
)
def test_nvcc_is_of_the_cuda_of_torch(tmp_path: Path, cuda: str, torch: str, state: str) -> None:
    nvcc(tmp_path / "cuda", cuda)
    bins = [Path("/usr/bin"), Path("/bin")]
    by_home = machine(*bins, CUDA_HOME=str(tmp_path / "cuda"))
    by_path = machine(tmp_path / "cuda/bin", *bins)
    by_default = machine(*bins, cuda=tmp_path / "cuda")
    for here in (by_home, by_path, by_default):
        assert look(here, "nvcc", torch=torch)["nvcc"].state == state
    skipped = machine(*bins, CUDA_HOME=str(tmp_path / "cuda"), DS_SKIP_CUDA_CHECK="1")
    assert look(skipped, "nvcc", torch=torch)["nvcc"].state == "ok"


# ------------------------------------------------------------------------------------- before ranks start


def refused(ds: dict[str, Any], here: Host, accelerator: Accelerator = CUDA) -> list[Problem]:
    return missing_compiler(decide(ds=ds, accelerator=accelerator), here)


def test_what_is_compiled_for_gpus_is_refused_where_there_is_no_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the place of the key, before the minutes that ranks take to find out; nowhere else."""
    monkeypatch.setattr(before_ranks, "cuda_of_torch", lambda: "13.0")
    without = machine(tmp_path, Path("/bin"))
    (problem,) = refused({**TORCHS, **ZEROPP}, without)
    assert (problem.key, problem.code) == ("zero_optimization.zero_quantized_weights", "nvcc")
    assert "compiles quantizer for it by nvcc at its first use, and there is no nvcc" in problem.message
    assert problem.fix.startswith("set zero_quantized_weights to false; or install the CUDA toolkit 13.0")
    assert [each.key for each in refused({**ADAM, **zero(1)}, without)] == ["optimizer.type"]
    for fine in ({**TORCHS, **zero(1)}, {**ADAM, **OFFLOAD}):
        assert refused(fine, without) == []
    assert refused({**ADAM, **zero(1)}, without, CPU) == []
    nvcc(tmp_path / "cuda", "13.0")
    assert refused({**TORCHS, **ZEROPP}, machine(Path("/bin"), CUDA_HOME=str(tmp_path / "cuda"))) == []
