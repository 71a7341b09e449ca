"""What DeepSpeed compiles at its first use for a configuration, and the tools that takes.

The start-up hook and a run call :func:`before_ranks`, so that ranks do not find out after minutes.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.config.ds_schema import ZERO
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.rules import compiles_optimizer, optimizer
from determined_ds.config.strategy import QUANTIZED
from determined_ds.devices import kind_of_device
from determined_ds.documents.document import KeyPath
from determined_ds.errors import ConfigError, Problem

NVCC, CXX, NINJA = "nvcc", "c++", "ninja"
INSTALL = {
    CXX: "apt install g++ (Debian and Ubuntu)",
    NINJA: "activate the environment that has it, or pip install ninja",
    NVCC: "install the CUDA toolkit that torch is built for and set CUDA_HOME,"
    " or use an image with it (docker/Dockerfile, BASE=nvidia/cuda:...-devel-...)",
}


class Op(NamedTuple):
    """An extension that DeepSpeed builds: its name, the key that asks for it, what builds it, how to avoid it."""

    name: str
    key: KeyPath
    tools: tuple[str, ...]
    instead: str


def ops_of(c: ResolvedConfig) -> list[Op]:
    """The extensions that a configuration has DeepSpeed build, and that were not installed with it."""
    on_host, on_device = (CXX, NINJA), (NVCC, CXX, NINJA)
    on_cuda, offload, kind = c.accelerator.name == "cuda", c.strategy.offload_optimizer, optimizer(c)
    kind = "adam" if kind == "adamw" else kind
    own_adam = kind == "adam" and not c.ds.get(("optimizer", "params", "torch_adam"))
    found = []
    # Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer; ops/op_builder/
    by_nvcc = compiles_optimizer(c.strategy, c) and kind in ("adam", "lamb", "lion")
    if by_nvcc or (own_adam and not on_cuda and offload is None):
        is_adam, tools = kind == "adam", on_device if by_nvcc else on_host
        instead = f"{'set' if is_adam else 'use AdamW with'} optimizer.params.torch_adam to true"
        found.append(Op(f"fused_{kind}", ("optimizer", "type"), tools, instead))
    if offload is not None and (own_adam or kind in ("lion", "adagrad")):  # takes no CUDA headers
        instead = "remove zero_optimization.offload_optimizer"
        found.append(Op(f"cpu_{kind}", (ZERO, "offload_optimizer"), on_host, instead))
    # Source: CUDAQuantizer in runtime/zero/partition_parameters.py; ops/op_builder/quantizer.py
    quantized = [key for key in QUANTIZED if on_cuda and c.ds.get((ZERO, key))]
    found += [Op("quantizer", (ZERO, key), on_device, f"set {key} to false") for key in quantized]
    # Source: runtime/swap_tensor/*_swapper.py; ops/op_builder/async_io.py, linked with the CUDA toolkit's libraries
    if "nvme" in (offload, c.strategy.offload_param):
        key = (ZERO, "offload_optimizer" if offload == "nvme" else "offload_param", "device")
        found.append(Op("async_io", key, on_device if on_cuda else on_host, "use device cpu"))
    built_in = _constants_of("deepspeed", "git_version_info_installed.py")
    installed = built_in.get("installed_ops", {}) if built_in.get("accelerator_name") == "cuda" else {}
    return [op for op in found if not (NVCC in op.tools and installed.get(op.name))]


def before_ranks(
    resolved: ResolvedConfig, environment: Mapping[str, str], warnings: Sequence[Problem] = ()
) -> None:
    """Check that what DeepSpeed compiles for GPUs can be compiled; on CPUs it fails at once, in DeepSpeed's own words.

    Args:
        resolved: What will run.
        environment: Variables of the ranks.
        warnings: What an error carries as well.

    Raises:
        ConfigError: no nvcc serves torch; a problem for each key that needs one.
    """
    wanted, problems = [op for op in ops_of(resolved) if NVCC in op.tools], []
    if wanted and kind_of_device(resolved.accelerator) == "cuda":  # ROCm has another compiler
        cuda = str(_constants_of("torch", "version.py").get("cuda") or "")  # without loading torch
        _, wrong = find_tool(NVCC, environment, cuda)
        for op in wanted if wrong else ():
            reason = f"DeepSpeed compiles {op.name} for it by nvcc at its first use, and there is {wrong}"
            fix = f"{op.instead}; or {INSTALL[NVCC]}"
            problems.append(resolved.ds.problem(op.key, reason, fix, "nvcc"))
    if problems:
        raise ConfigError(problems, warnings)


def ask(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: str = "",
    timeout_s: float = 20.0,
    cwd: Path | None = None,
) -> tuple[str, str]:
    """Run a program to its end. Returns its stdout and "", or "" and why it failed: the last line that it wrote."""
    program = shutil.which(words[0], path=environment.get("PATH", os.defpath))
    if program is None:
        return "", f"there is no {words[0]} on PATH"
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "cwd": cwd}
    options |= {"input": stdin, "timeout": timeout_s, "env": dict(environment)}
    try:
        done = subprocess.run([program, *words[1:]], **options)
    except subprocess.TimeoutExpired:  # e.g. an nvidia-smi whose driver hangs
        return "", f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return "", str(error.strerror)
    if done.returncode == 0:
        return done.stdout, ""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "", lines[-1].strip()[:300] if lines else f"exit code {done.returncode}"


def find_tool(tool: str, environment: Mapping[str, str], torch_cuda: str = "") -> tuple[str, str]:
    """Look for a tool as what builds with it does. Returns what there is and "", or "" and what is wrong.

    Source: ``get_cxx_compiler``, ``is_ninja_available`` and ``_find_cuda_home`` in torch 2.13's cpp_extension.py;
    ``assert_no_cuda_mismatch`` in deepspeed 0.19.8 ops/op_builder/.
    """
    if tool != NVCC:
        name = (environment.get("CXX") or tool) if tool == CXX else tool
        said, wrong = ask([*shlex.split(name), "--version"], environment)
        return said.partition("\n")[0], wrong
    on_path = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    home = home or (str(Path(on_path).parent.parent) if on_path else "/usr/local/cuda")
    release = re.search(r"release (\d+)\.(\d+)", ask([f"{home}/bin/nvcc", "-V"], environment)[0])
    if release is None:
        return "", f"no nvcc in {home}, on PATH or in CUDA_HOME"
    major, minor = release.groups()
    # DeepSpeed lets the minor versions of these differ (cuda_minor_mismatch_ok), and none of others.
    fits = [major, minor][: 1 if major in ("10", "11", "12") else 2]
    is_other = torch_cuda and torch_cuda.split(".")[: len(fits)] != fits
    if is_other and environment.get("DS_SKIP_CUDA_CHECK") != "1":
        return "", f"nvcc {major}.{minor} in {home}, and torch is built for CUDA {torch_cuda}"
    return f"{major}.{minor} in {home}", ""


def _constants_of(package: str, file: str) -> dict[str, Any]:
    """The names of a generated file of constants, without loading its package; {} where it cannot be read."""
    try:
        spec = find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        return runpy.run_path(str(Path(folders[0], file))) if folders else {}
    except Exception:  # a broken package is found by importing it
        return {}
