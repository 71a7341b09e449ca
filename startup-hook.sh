#!/usr/bin/env bash
# Before the trial, in the task's container: installs what setup.cfg asks for and the image lacks, at the versions of
# constraints.txt. With nothing missing it takes a moment and no network. It ends the task where it fails, and where the
# configuration cannot run.
#
# Determined sources this file from the context directory, so what it exports the trial gets. Its trace of each command
# would stand between a refusal and the end of the log.
{ set +x; } 2>/dev/null
DS_BUILD_OPS=0 python3 - <<'PY' || exit 1
import sys

if sys.version_info < (3, 10):
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"ERROR: startup-hook: determined_ds needs Python 3.10 or newer, python3 here is {found}: choose another image.")

import configparser
import json
import os
import subprocess
import tempfile
from importlib import metadata

try:
    from packaging.requirements import Requirement
    from packaging.version import Version
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.version import Version


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fits(requirement, version):
    if version is None:
        return False
    # NVIDIA's torch 2.6.0a0+... sorts below 2.6, and has nearly all of it.
    known = [version, Version(version).base_version] if requirement.name == "torch" else [version]
    return any(requirement.specifier.contains(each, prereleases=True) for each in known)


for name in ("setup.cfg", "constraints.txt", "determined_ds"):
    if not os.path.exists(name):
        sys.exit(
            f"ERROR: startup-hook: {name} is not in the context directory, {os.getcwd()}. Create the experiment from the "
            "folder that holds it, and see that .detignore lets it through."
        )

setup = configparser.ConfigParser()
setup.read("setup.cfg")
extras = setup["options.extras_require"]
lines = setup["options"]["install_requires"] + extras["models"]
# The clients of the tools that the trial reports to.
tools = json.loads(os.environ.get("DET_HPARAMS") or "{}").get("logging")
clients = {}
for tool, options in tools.items() if isinstance(tools, dict) else ():
    if options is not False and tool in extras:
        lines += extras[tool]
        clients |= dict.fromkeys((r.name for r in map(Requirement, filter(None, extras[tool].splitlines()))), tool)
wanted = {r.name: r for r in map(Requirement, filter(None, lines.splitlines()))}
missing = {n: r for n, r in wanted.items() if not fits(r, installed(n))}

# torch is built for the image's CUDA and determined comes with the cluster: neither is ever replaced.
for name in ("torch", "determined"):
    if name in missing:
        found = installed(name) or "none"
        sys.exit(
            f"ERROR: startup-hook: determined_ds needs {wanted[name]}, and this image has {name} {found}. Name one that fits in "
            "environment.image; docker/Dockerfile makes one. (Determined's default, determinedai/pytorch-ngc, has torch "
            "2.3: see \"The image\" in docs/cluster.md.)"
        )

if missing:
    # Of what the image has, only what does not fit may change; what comes in anew comes as it was tested.
    pins = [f"{name}=={installed(name)}" for name in ("torch", "determined")]
    for line in open("constraints.txt"):
        name = line.split("==")[0]
        if not line.startswith("#") and (name in missing or not installed(name)):
            pins.append(line.strip())
    names = ", ".join(f"{requirement} (here: {installed(n) or 'none'})" for n, requirement in missing.items())
    print(f"startup-hook: installing {names}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints.name]
        if subprocess.call([*pip, *map(str, missing.values())]):
            off = " and ".join(f"hyperparameters.logging.{clients[n]}: false" for n in missing if n in clients)
            sys.exit(
                f"ERROR: startup-hook: could not install {names}. pip says why above. Give the containers a way to a package "
                "index (PIP_INDEX_URL in environment.environment_variables), or use an image that has them"
                + (f", or leave it out: {off}." if off else ".")
            )

try:
    import determined_ds
except Exception as error:
    sys.exit(f"ERROR: startup-hook: determined_ds does not import here: {type(error).__name__}: {error}")
if not os.path.samefile(os.path.dirname(determined_ds.__file__), "determined_ds"):
    sys.exit(
        f"ERROR: startup-hook: python3 takes determined_ds from {os.path.dirname(determined_ds.__file__)}, not from the "
        "context directory: unset PYTHONSAFEPATH in the image."
    )
PY

# What ranks find in their environment; and where they would refuse the configuration, it is refused here.
determined_ds_says=$(python3 -m determined_ds.cluster.startup) || exit $?
eval "$determined_ds_says"
unset determined_ds_says
