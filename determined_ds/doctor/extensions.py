"""What DeepSpeed compiles at its first use for a configuration, the tools that takes, and the locks of killed builds.

:func:`ops_of` says what a configuration has built, :func:`find_tool` looks for a compiler as torch and DeepSpeed do,
and :func:`locks_left` finds locks on which a build would wait forever. The start-up hook and ``det-ds run`` call
:func:`before_ranks`, so that ranks do not find out after minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from determined_ds.config.ds_schema import ZERO
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.rules import compiles_optimizer, optimizer
from determined_ds.config.strategy import QUANTIZED
from determined_ds.devices import kind_of_device
from determined_ds.documents.document import KeyPath
from determined_ds.errors import ConfigError, Problem

NVCC, CXX, NINJA = "nvcc", "c++", "ninja"
ASK_S = 20.0  # an nvidia-smi whose driver hangs never answers
QUIET_S = (
    3600.0  # a compiler writes more often: no build is running, even where others' processes are not seen
)
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h
SHARED_FILE_SYSTEM = re.compile("nfs|cifs|smb|lustre|gpfs|beegfs|ceph|9p|fuse|virtiofs|afs")


class Op(NamedTuple):
    """An extension that DeepSpeed builds: its name, the key that asks for it, what builds it, how to avoid it."""

    name: str
    key: KeyPath
    tools: tuple[str, ...]
    instead: str


def ops_of(c: ResolvedConfig) -> list[Op]:
    """The extensions that a configuration has DeepSpeed build."""
    on_host: tuple[str, ...] = (CXX, NINJA)
    on_device = (NVCC, *on_host)
    on_cuda, kind, offload = c.accelerator.name == "cuda", optimizer(c), c.strategy.offload_optimizer
    adam = kind in ("adam", "adamw")
    own_adam = adam and not c.ds.get(("optimizer", "params", "torch_adam"))
    found = []
    # Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer; ops/op_builder/
    by_nvcc = compiles_optimizer(c.strategy, c) and (adam or kind in ("lamb", "lion"))
    if by_nvcc or (own_adam and c.accelerator.name == "cpu" and offload is None):
        instead = "use AdamW with torch_adam: true"
        if adam:
            instead = "set optimizer.params.torch_adam to true, which takes torch's own AdamW"
        tools = on_device if by_nvcc else on_host
        found.append(Op(f"fused_{'adam' if adam else kind}", ("optimizer", "type"), tools, instead))
    if offload is not None and (own_adam or kind in ("lion", "adagrad")):  # takes no CUDA headers
        instead = "remove zero_optimization.offload_optimizer"
        name = f"cpu_{'adam' if adam else kind}"
        found.append(Op(name, (ZERO, "offload_optimizer"), on_host, instead))
    # Source: CUDAQuantizer in runtime/zero/partition_parameters.py; ops/op_builder/quantizer.py
    quantized = [key for key in QUANTIZED if on_cuda and c.ds.get((ZERO, key))]
    found += [Op("quantizer", (ZERO, key), on_device, f"set {key} to false") for key in quantized]
    # Source: runtime/swap_tensor/*_swapper.py; ops/op_builder/async_io.py, linked with the CUDA toolkit's libraries
    if "nvme" in (offload, c.strategy.offload_param):
        key = (ZERO, "offload_optimizer" if offload == "nvme" else "offload_param", "device")
        found.append(Op("async_io", key, on_device if on_cuda else on_host, "use device cpu"))
    return found


def before_ranks(
    resolved: ResolvedConfig, environment: Mapping[str, str], warnings: Sequence[Problem] = ()
) -> list[str]:
    """Check that what DeepSpeed compiles for GPUs can be compiled, and remove the locks of killed builds.

    On CPUs a missing compiler fails at once, with DeepSpeed's own words.

    Args:
        resolved: What will run.
        environment: Variables of the ranks.
        warnings: What an error carries as well.

    Returns:
        A line for each lock that no process here holds, removed or not.

    Raises:
        ConfigError: no nvcc serves torch; a problem for each key that needs one.
    """
    ops = ops_of(resolved)
    if kind_of_device(resolved.accelerator) == "cuda":  # ROCm has another compiler
        wanted = [op for op in ops if NVCC in op.tools and not is_prebuilt(op.name)]
        cuda = cuda_of_torch()
        _, wrong = find_tool(NVCC, environment, cuda) if wanted else ("", "")
        if wrong:
            reason = "DeepSpeed compiles {} for it by nvcc at its first use, and there is {}"
            fix = how_to_install(NVCC, cuda)
            raise ConfigError(
                [
                    resolved.ds.problem(
                        op.key, reason.format(op.name, wrong), f"{op.instead}; or {fix}", "nvcc"
                    )
                    for op in wanted
                ],
                warnings,
            )
    said = []
    for lock in locks_left(root_of_extensions(environment), now=time.time()) if ops else ():
        if lock.is_stale and _identity(lock.path) == lock.identity:
            with contextlib.suppress(OSError):
                lock.path.unlink()
                said.append(f"removed {lock.path}, the lock of a build that was killed: {lock.why}")
                continue
        said.append(
            f"{lock.path} locks the build of an extension, {lock.why}: ranks that build it wait. "
            f"fix: if no other process builds it, rm {lock.path}"
        )
    return said


# ------------------------------------------------------------------------------------- tools


def ask(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    stdin: str = "",
    timeout_s: float = ASK_S,
) -> tuple[str, str]:
    """Run a program to its end. Returns its stdout and "", or "" and why it failed: the last line that it wrote."""
    program = shutil.which(words[0], path=environment.get("PATH", os.defpath))
    if program is None:
        return "", f"there is no {words[0]} on PATH"
    try:
        done = subprocess.run(
            [program, *words[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=dict(environment),
            cwd=cwd,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return "", str(error.strerror)
    if done.returncode == 0:
        return done.stdout, ""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "", lines[-1].strip() if lines else f"exit code {done.returncode}"


def find_tool(tool: str, environment: Mapping[str, str], torch_cuda: str = "") -> tuple[str, str]:
    """Look for a tool as what builds with it does.

    Args:
        tool: ``nvcc``, ``c++`` or ``ninja``.
        environment: Variables of the ranks.
        torch_cuda: The CUDA that torch is built for; "" where that is none, or not known.

    Returns:
        What there is and "", or "" and what is wrong.

    Source: ``get_cxx_compiler``, ``is_ninja_available`` and ``_find_cuda_home`` in torch 2.13's cpp_extension.py;
    ``assert_no_cuda_mismatch`` in deepspeed 0.19.8 ops/op_builder/.
    """
    if tool != NVCC:
        name = (environment.get("CXX") or tool) if tool == CXX else tool
        said, wrong = ask([*shlex.split(name), "--version"], environment)
        if wrong:
            return "", wrong if wrong.startswith("there is no ") else f"{name} fails: {wrong}"
        return said.splitlines()[0], ""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    on_path = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    if not (environment.get("CUDA_HOME") or environment.get("CUDA_PATH")):
        home = str(Path(on_path).parent.parent) if on_path else home
        if not Path(home).exists():
            return "", "no nvcc: neither CUDA_HOME nor CUDA_PATH, no nvcc on PATH, nothing at /usr/local/cuda"
    said, wrong = ask([f"{home}/bin/nvcc", "-V"], environment)
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        return "", f"no nvcc in {home}: {wrong or 'it names no release'}"
    major, minor = release.groups()
    torch_major, _, torch_minor = torch_cuda.partition(".")
    # DeepSpeed lets the minor versions of these differ (cuda_minor_mismatch_ok), and none of others.
    fits = major == torch_major and (minor == torch_minor.partition(".")[0] or major in ("10", "11", "12"))
    if torch_cuda and not fits and environment.get("DS_SKIP_CUDA_CHECK") != "1":
        return "", f"nvcc {major}.{minor} in {home}, and torch is built for CUDA {torch_cuda}"
    return f"{major}.{minor} in {home}", ""


def how_to_install(tool: str, torch_cuda: str = "") -> str:
    """The fix of a missing tool."""
    beside = Path(sys.executable).with_name("ninja")
    if tool == NINJA and beside.exists():
        return f"put {beside.parent} on PATH: activate the environment"
    toolkit = f"install the CUDA toolkit{f' {torch_cuda}' if torch_cuda else ''} and set CUDA_HOME"
    return {
        CXX: "apt install g++ (Debian and Ubuntu)",
        NINJA: "pip install ninja",
        NVCC: f"{toolkit}, or use an image with it (docker/Dockerfile, BASE=nvidia/cuda:...-devel-...)",
    }[tool]


def cuda_of_torch() -> str:
    """The CUDA that torch is built for, from its version file: without the seconds that loading torch takes."""
    return str(_names_in("torch", "version.py").get("cuda") or "")


def is_prebuilt(op: str) -> bool:
    """Whether DeepSpeed was installed with an extension built in. Source: its ``git_version_info.py``."""
    names = _names_in("deepspeed", "git_version_info_installed.py")
    return names.get("accelerator_name") == "cuda" and bool(names.get("installed_ops", {}).get(op))


def _names_in(package: str, file: str) -> dict[str, Any]:
    """The names of a generated file of constants, without loading its package; {} where it cannot be read."""
    try:
        spec = find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        return runpy.run_path(str(Path(folders[0], file))) if folders else {}
    except Exception:  # a broken package is found by importing it
        return {}


# ------------------------------------------------------------------------------------- locks


class Lock(NamedTuple):
    """A lock that no process here holds.

    Args:
        path: The file.
        identity: Its device and inode: another build may have released this one and made its own.
        is_stale: Whether it is certain that no process holds it.
        why: What is known of it, in a clause.
    """

    path: Path
    identity: tuple[int, int]
    is_stale: bool
    why: str


def root_of_extensions(environment: Mapping[str, str]) -> Path:
    """Where torch builds. Source: ``_get_build_directory`` in torch 2.13's ``torch/utils/cpp_extension.py``."""
    stated = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    return Path(stated) if stated else Path(cache) / "torch_extensions"


def locks_left(root: Path, *, now: float) -> list[Lock]:
    """Every lock below a folder of extensions that no process of this machine holds.

    torch locks the folder of an extension by a file that it keeps open while it builds. A build that is killed leaves
    the file, without a process id in it, and the next one waits until it is removed. Compilers of the killed build may
    still run: they write what the next build writes again before it links.

    Args:
        root: As :func:`root_of_extensions`.
        now: Seconds, by the clock of the file system.

    Source: ``FileBaton`` in torch 2.13's ``torch/utils/file_baton.py``, ``_jit_compile`` in its ``cpp_extension.py``.
    """
    # In this order: a holder has opened its lock before the lock is found here.
    paths = [path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern) if path.is_file()]
    found = {path: identity for path in paths if (identity := _identity(path)) is not None}
    held = set()
    for folder in Path("/proc").glob("[0-9]*/fd") if found else ():
        with contextlib.suppress(OSError):  # of another user, or gone
            for entry in os.scandir(folder):
                held.add(_identity(Path(entry)))
    left = []
    for path, identity in found.items():
        if identity in held:
            continue
        times = [now]
        with contextlib.suppress(OSError):  # removed by a compiler meanwhile
            times = [each.stat(follow_symlinks=False).st_mtime for each in os.scandir(path.parent)]
        idle_s = now - max(times, default=now)
        minutes = f"{idle_s / 60:.0f} minutes"
        is_stale = True
        if _sees_every_holder(path, identity[0]):
            why = "no process of this machine holds it"
        elif idle_s >= QUIET_S:
            why = f"no process here holds it, and nothing was written for {minutes}"
        else:
            is_stale = False
            why = (
                f"which no process here holds; another machine or container may (last written {minutes} ago)"
            )
        left.append(Lock(path, identity, is_stale, why))
    return left


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # just released
        return None
    return status.st_dev, status.st_ino


def _sees_every_holder(path: Path, device: int) -> bool:
    """Whether any process that could hold a file is visible: here, of this user, not in another container."""
    real = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    try:
        is_ours = os.geteuid() in (0, path.stat().st_uid)
        in_first = os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
        is_of_container = device == os.stat("/").st_dev
    except OSError:
        return False
    is_local = bool(kind) and SHARED_FILE_SYSTEM.match(kind) is None
    return is_ours and is_local and (in_first or is_of_container)
