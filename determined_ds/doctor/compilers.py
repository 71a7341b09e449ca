"""The tools that build DeepSpeed's extensions: found as torch and DeepSpeed find them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from determined_ds.doctor.diagnosis import MISSING, OK, WARNING, Diagnosis
from determined_ds.doctor.extensions import CXX, LIBAIO, NINJA, NVCC
from determined_ds.doctor.surroundings import Answer, Host

INSTALL = {
    CXX: "apt install g++ (Debian and Ubuntu)",
    NINJA: "pip install ninja",
    LIBAIO: "apt install libaio-dev (Debian and Ubuntu)",
    NVCC: "install the CUDA toolkit{} and set CUDA_HOME, or use an image with it "
    "(docker/Dockerfile, BASE=nvidia/cuda:...-devel-...)",
}
# Minor versions of CUDA whose toolkit and torch may differ; of the others they must be equal.
# Source: ``cuda_minor_mismatch_ok`` and ``assert_no_cuda_mismatch`` in deepspeed 0.19.8 ops/op_builder/builder.py.
MINORS_MIX = (10, 11, 12)
LINKS_LIBAIO = "#include <libaio.h>\nint main() { io_context_t context; return io_setup(1, &context); }\n"


def check_compilers(
    host: Host, wanted: Mapping[str, list[str]], *, torch_cuda: str, has_gpus: bool
) -> list[Diagnosis]:
    """A finding for each tool.

    Args:
        host: Where to look.
        wanted: Tool -> what it is needed for, in words; a tool that is not in it is not needed.
        torch_cuda: The CUDA that torch is built for; "" where that is none, or not known.
        has_gpus: Whether there is anything to compile for.
    """
    found = {CXX: _cxx(host), NINJA: _ninja(host), NVCC: _nvcc(host, torch_cuda)}
    if LIBAIO in wanted:
        found[LIBAIO] = _libaio(host)
    findings = []
    for tool, (version, problem) in found.items():
        uses = ", ".join(wanted.get(tool, ()))
        if not problem:
            findings.append(Diagnosis(tool, OK, version, needed=uses))
            continue
        needed = uses or ("what is compiled for GPUs: ZeRO++, NVMe" if tool == NVCC else "offload to the CPU")
        idle = not uses and not (tool == NVCC and has_gpus)
        state = MISSING if uses else OK if idle else WARNING
        fix = "" if idle else _fix(host, tool, torch_cuda)
        without = f"{problem}; nothing here needs it" if idle else problem
        findings.append(Diagnosis(tool, state, without, needed=needed, fix=fix))
    return findings


def _fix(host: Host, tool: str, torch_cuda: str) -> str:
    beside = Path(host.python).with_name("ninja")
    if tool == NINJA and beside.exists():
        return f"put {beside.parent} on PATH: activate the environment"
    return INSTALL[tool].format(f" {torch_cuda}" if torch_cuda else "")


def _cxx(host: Host) -> tuple[str, str]:
    """(version, problem). Source: ``get_cxx_compiler`` in torch 2.13's ``torch/utils/cpp_extension.py``."""
    name = host.variable("CXX") or "c++"
    answer = host.ask([*shlex.split(name), "--version"])
    if not answer.worked:
        return "", _why_not(name, answer)
    return answer.said.splitlines()[0], ""


def _ninja(host: Host) -> tuple[str, str]:
    """(version, problem). Source: ``is_ninja_available``, there too."""
    answer = host.ask(["ninja", "--version"])
    return (answer.said.strip(), "") if answer.worked else ("", _why_not("ninja", answer))


def _why_not(program: str, answer: Answer) -> str:
    return answer.said if answer.code is None else f"{program} fails: {answer.last_line}"


def _libaio(host: Host) -> tuple[str, str]:
    """(version, problem). Source: ``AsyncIOBuilder.is_compatible``, which links a call of it, too."""
    flags = shlex.split(host.variable("CFLAGS")), shlex.split(host.variable("LDFLAGS"))
    words = ["c++", "-x", "c++", *flags[0], "-", "-o", "/dev/null", *flags[1], "-laio"]
    answer = host.ask(words, stdin=LINKS_LIBAIO)
    return ("its header and its library", "") if answer.worked else ("", "no libaio to link with")


def _nvcc(host: Host, torch_cuda: str) -> tuple[str, str]:
    """(version, problem), as DeepSpeed has it: of the same CUDA as torch."""
    home = cuda_home(host)
    if home is None:
        return "", "no nvcc: neither CUDA_HOME nor CUDA_PATH, no nvcc on PATH, nothing at /usr/local/cuda"
    answer = host.ask([str(home / "bin/nvcc"), "-V"])
    release = re.search(r"release (\d+)\.(\d+)", answer.said)
    if not answer.worked or release is None:
        return "", f"no nvcc in {home}: {answer.last_line}"
    version = ".".join(release.groups())
    torchs = tuple(torch_cuda.split(".")[:2])
    if torch_cuda and torchs != release.groups() and host.variable("DS_SKIP_CUDA_CHECK") != "1":
        mixes = torchs[0] == release[1] and int(release[1]) in MINORS_MIX
        if not mixes:
            return version, f"{version} in {home}, and torch is built for CUDA {torch_cuda}"
    return f"{version} in {home}", ""


def cuda_home(host: Host) -> Path | None:
    """Where the CUDA toolkit is. Source: ``_find_cuda_home`` in torch 2.13's ``torch/utils/cpp_extension.py``."""
    stated = host.variable("CUDA_HOME") or host.variable("CUDA_PATH")
    if stated:
        return Path(stated)
    nvcc = host.which("nvcc")
    if nvcc is not None:
        return Path(nvcc).parent.parent
    return host.cuda if host.cuda.exists() else None


def cuda_of_torch() -> str:
    """The CUDA that torch is built for, read from its file: without the seconds that loading it takes."""
    found = _literal("torch", "version.py", "cuda")
    return found if isinstance(found, str) else ""


def is_prebuilt(op: str) -> bool:
    """Whether DeepSpeed was installed with an extension built in. Source: its ``git_version_info.py``."""
    installed = _literal("deepspeed", "git_version_info_installed.py", "installed_ops")
    accelerator = _literal("deepspeed", "git_version_info_installed.py", "accelerator_name")
    return accelerator == "cuda" and isinstance(installed, dict) and bool(installed.get(op))


def _literal(package: str, file: str, name: str) -> object:
    """The value that a module of a package gives a name, without running it."""
    try:
        spec = find_spec(package)
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text()) if spec else None  # type: ignore[index]
    except (ImportError, OSError, SyntaxError, TypeError, ValueError, IndexError):
        return None
    for node in tree.body if tree else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            try:
                return ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None
