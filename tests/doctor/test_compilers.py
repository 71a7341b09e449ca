"""The tools that DeepSpeed's extensions are built with: which a configuration needs, and whether they are here."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.extensions import OPS, ops_of
from determined_ds.doctor import before_ranks
from determined_ds.doctor.before_ranks import missing_compiler
from determined_ds.doctor.compilers import check_compilers, cuda_of_torch, is_prebuilt
from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.surroundings import Host
from determined_ds.errors import Problem
from tests.doctor.programs import machine, nvcc, program
from tests.making import CPU, CUDA, decide

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


@pytest.mark.parametrize("name", sorted({op.name for op in OPS}))
def test_the_names_are_deepspeeds(name: str) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    folder = Path(importlib.import_module("deepspeed.ops.op_builder").__file__ or "").parent
    in_files = {path.stem for path in (*folder.glob("*.py"), *folder.glob("cpu/*.py"))}
    assert name in in_files | set(ALL_OPS)


# ------------------------------------------------------------------------------------- what is here


def look(here: Host, *tools: str, torch: str = "13.0", gpus: bool = True) -> dict[str, Diagnosis]:
    wanted = {tool: ["cpu_adam (zero_optimization.offload_optimizer)"] for tool in tools}
    return {each.name: each for each in check_compilers(here, wanted, torch_cuda=torch, has_gpus=gpus)}


def test_on_a_path_without_a_compiler_what_needs_one_is_missing(tmp_path: Path) -> None:
    found = look(machine(tmp_path), "c++", "ninja", gpus=False)
    assert {name: finding.state for name, finding in found.items()} == {
        "c++": "missing",
        "ninja": "missing",
        "nvcc": "ok",
    }
    assert found["c++"].found == "there is no c++ on PATH"
    assert found["c++"].needed == "cpu_adam (zero_optimization.offload_optimizer)"
    assert found["c++"].fix.startswith("apt install g++")
    assert "nothing here needs it" in found["nvcc"].found


def test_without_a_configuration_nothing_is_missing_and_gpus_make_nvcc_a_warning(tmp_path: Path) -> None:
    assert {finding.state for finding in look(machine(tmp_path), gpus=False).values()} == {"ok"}
    with_gpus = look(machine(tmp_path))
    assert (with_gpus["nvcc"].state, with_gpus["c++"].state) == ("warning", "ok")
    assert "CUDA toolkit 13.0" in with_gpus["nvcc"].fix


def test_ninja_of_an_environment_that_is_not_activated_is_named(tmp_path: Path) -> None:
    program(tmp_path / "venv/bin", "ninja", "#!/bin/sh\necho 1.13.0\n")
    here = Host(environment={"PATH": str(tmp_path)}, python=str(tmp_path / "venv/bin/python"))
    assert look(here, "ninja")["ninja"].fix.startswith(f"put {tmp_path}/venv/bin on PATH")


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


def test_a_toolkit_without_nvcc_is_no_toolkit(tmp_path: Path) -> None:
    found = look(machine(tmp_path, CUDA_HOME=str(tmp_path)), "nvcc")["nvcc"]
    assert (found.state, f"no nvcc in {tmp_path}" in found.found) == ("missing", True)


def test_libaio_is_linked_with(tmp_path: Path) -> None:
    """A compiler that links nothing stands for a machine without it."""
    program(tmp_path, "c++", '#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac; echo c++ 12\n')
    assert look(machine(tmp_path, Path("/bin")), "libaio")["libaio"].state == "missing"
    program(tmp_path, "c++", "#!/bin/sh\necho c++ 12\n")
    assert look(machine(tmp_path, Path("/bin")), "libaio")["libaio"].state == "ok"


def test_what_torch_and_deepspeed_were_built_for_is_read_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert cuda_of_torch() == (torch.version.cuda or "")
    assert not is_prebuilt("cpu_adam")
    for package, file, text in (
        ("torch", "version.py", "from typing import Optional\ncuda: Optional[str] = '12.8'\n"),
        (
            "deepspeed",
            "git_version_info_installed.py",
            "installed_ops={'quantizer': True, 'cpu_adam': False}\naccelerator_name='cuda'\n",
        ),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError\n")
        (tmp_path / package / file).write_text(text)
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert (cuda_of_torch(), is_prebuilt("quantizer"), is_prebuilt("cpu_adam")) == ("12.8", True, False)


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


def test_an_extension_that_deepspeed_was_installed_with_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_ranks, "is_prebuilt", lambda op: op == "quantizer")
    without = machine(tmp_path)
    assert refused({**TORCHS, **ZEROPP}, without) == []
    assert len(refused({**ADAM, **zero(1)}, without)) == 1


def test_the_real_compiler_of_this_machine_is_found() -> None:
    here = machine(*map(Path, os.environ["PATH"].split(os.pathsep)))
    if here.which("c++") is None:
        pytest.skip("no C++ compiler here")
    assert look(here, "c++")["c++"].state == "ok"
