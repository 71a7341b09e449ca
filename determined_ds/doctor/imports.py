"""Whether torch, DeepSpeed and Determined import, and are the installed ones: tried in another interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from determined_ds.doctor.diagnosis import MISSING, OK, WARNING, Diagnosis
from determined_ds.doctor.surroundings import Host
from determined_ds.doctor.versions import installed_version

IMPORTED = ("torch", "deepspeed", "determined")
IMPORT_S = 180.0
MARK = "determined-ds-doctor "
# What an interpreter says of the packages that train; each by itself, so that a broken one hides no other.
PROGRAM = f"""
import importlib, json, os, sys
said = os.dup(1)
os.dup2(2, 1)
found = {{}}
for name in {IMPORTED!r}:
    try:
        module = importlib.import_module(name)
        found[name] = {{"version": str(getattr(module, "__version__", "")), "file": getattr(module, "__file__", "")}}
        if name == "torch":
            gpus = module.cuda.device_count()
            found[name].update(
                cuda=module.version.cuda or "",
                hip=getattr(module.version, "hip", None) or "",
                gpus=gpus,
                capability=list(module.cuda.get_device_capability(0)) if gpus and not module.version.hip else [9, 0],
            )
    except BaseException as error:
        found[name] = {{"error": f"{{type(error).__name__}}: {{error}}"}}
os.write(said, ({MARK!r} + json.dumps(found)).encode())
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """torch, as a rank would find it.

    Args:
        cuda: The CUDA that it is built for, e.g. ``13.0``; "" where for none.
        hip: The same of ROCm.
        gpus: Devices that it sees.
        native_bf16: Whether they compute in bf16.
        error: Why it does not import; "" where it does.
    """

    cuda: str = ""
    hip: str = ""
    gpus: int = 0
    native_bf16: bool = False
    error: str = ""


def check_imports(host: Host) -> tuple[Torch, list[Diagnosis]]:
    """Import what trains, in a process of its own: a finding for what does not import, or is not what is installed.

    Source: a rank starts as ``python -m`` in the context directory, so that a folder there comes before a package.
    """
    answer = host.ask([host.python, "-c", PROGRAM], timeout_s=IMPORT_S)
    _, mark, text = answer.said.partition(MARK)
    if not mark:  # it has crashed, as of a library that does not fit
        fix = f"run {host.python} -c 'import torch, deepspeed', and install anew what does not import"
        finding = Diagnosis("torch import", MISSING, answer.last_line, needed="that it imports", fix=fix)
        return Torch(error=answer.last_line), [finding]
    found = json.loads(text)
    torch = found["torch"]
    findings = [finding for name in IMPORTED for finding in _import_findings(name, found[name])]
    if "error" in torch:
        return Torch(error=torch["error"]), findings
    if not findings:
        built = f"torch for CUDA {torch['cuda']}" if torch["cuda"] else f"torch for {torch['hip'] or 'CPUs'}"
        findings = [Diagnosis("imports", OK, f"{built}, {', '.join(IMPORTED[1:])}")]
    native = bool(torch["hip"]) or tuple(torch["capability"]) >= (8, 0)
    return Torch(cuda=torch["cuda"], hip=torch["hip"], gpus=torch["gpus"], native_bf16=native), findings


def _import_findings(name: str, found: dict[str, str]) -> Iterator[Diagnosis]:
    installed = installed_version(name)
    if "error" in found:
        if installed is not None:  # else it is missing, which its version says
            first = found["error"].strip().splitlines()[0]
            fix = f"install {name} anew, as built for this Python and this machine"
            needed = "that it imports"
            yield Diagnosis(f"{name} import", MISSING, first[:300], needed=needed, fix=fix)
        return
    if installed is None or not found["version"] or _same_release(found["version"], installed):
        return
    yield Diagnosis(
        f"{name} import",
        WARNING,
        f"imports {found['version']} from {found['file']}, and {installed} is what is installed",
        needed="one version",
        fix="remove the other from PYTHONPATH, or from the context directory",
    )


def _same_release(one: str, other: str) -> bool:
    try:
        return Version(one).release == Version(other).release
    except InvalidVersion:
        return one == other
