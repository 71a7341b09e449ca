"""Versions of what is installed, against what determined-ds asks for and what was tested."""

from __future__ import annotations

import configparser
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import determined_ds
from determined_ds.doctor.finding import MISSING, OK, UNKNOWN, WARNING, Finding

ROOT = Path(determined_ds.__file__).parents[1]
MODELS = "models"  # the extra of the templates
PYTHON = ">=3.10"


def look_at_versions(context_dir: Path) -> list[Finding]:
    """What is installed against what is asked for: a finding for each package that determined-ds names."""
    here = platform.python_version()
    findings = [
        Finding(
            name="python",
            state=OK if SpecifierSet(PYTHON).contains(here, prereleases=True) else MISSING,
            found=here,
            needed=PYTHON,
            fix="" if SpecifierSet(PYTHON).contains(here, prereleases=True) else "use Python 3.10 or newer",
        )
    ]
    asked = requirements(context_dir)
    if not asked:
        return [
            *findings,
            Finding(name="packages", state=UNKNOWN, found="no metadata of determined-ds, no setup.cfg"),
        ]
    tested = tested_versions(context_dir)
    return [
        *findings,
        *(_version_finding(requirement, tested, optional=optional) for requirement, optional in asked),
    ]


def _version_finding(requirement: Requirement, tested: dict[str, str], *, optional: bool) -> Finding:
    name = requirement.name
    found = installed_version(name)
    needed = f"{requirement.specifier}"
    if name in tested:
        needed += f" (tested: {tested[name]})"
    if optional:
        needed += ", for the models of this repository"
    install = f"pip install '{requirement}'"
    if (ROOT / "constraints.txt").exists():
        install += f" -c {ROOT / 'constraints.txt'}"
    if name in ("torch", "determined"):
        install = f"{install}, or on a cluster another environment.image: docker build -f docker/Dockerfile ."
    lacking = WARNING if optional else MISSING
    if found is None:
        return Finding(name=name, state=lacking, found="not installed", needed=needed, fix=install)
    fitting = fits(requirement, found)
    if fitting == OK:
        return Finding(name=name, state=OK, found=found, needed=needed)
    if fitting == WARNING:
        message = f"{found}, built from before {Version(found).base_version} was finished"
        return Finding(name=name, state=WARNING, found=message, needed=needed, fix=f"if it fails: {install}")
    return Finding(name=name, state=lacking, found=found, needed=needed, fix=install)


def fits(requirement: Requirement, version: str) -> str:
    """Whether an installed version is one that is asked for.

    NVIDIA's images have a torch that calls itself 2.6.0a0+...: it sorts below 2.6, and has nearly all of it.

    Returns:
        ``ok``; ``warning`` for such a torch; ``missing``.
    """
    if requirement.specifier.contains(version, prereleases=True):
        return OK
    if requirement.name == "torch" and requirement.specifier.contains(Version(version).base_version):
        return WARNING
    return MISSING


def requirements(context_dir: Path) -> list[tuple[Requirement, bool]]:
    """What determined-ds asks for, and what its models do, with whether it is optional.

    From ``setup.cfg`` in the context directory or beside the package, else from the installed package's metadata.
    """
    for folder in (context_dir, ROOT):
        setup = configparser.ConfigParser()
        setup.read(folder / "setup.cfg")
        if setup.get("metadata", "name", fallback="") == "determined-ds":
            always = setup.get("options", "install_requires", fallback="")
            models = setup.get("options.extras_require", MODELS, fallback="")
            return [*_parsed(always.splitlines(), False), *_parsed(models.splitlines(), True)]
    try:
        lines = metadata.requires("determined-ds") or []
    except metadata.PackageNotFoundError:
        return []
    found = list(_parsed(lines, False))
    always_too = [each for each, _ in found if each.marker is None]
    of_models = [each for each, _ in found if each.marker and each.marker.evaluate({"extra": MODELS})]
    return [(each, False) for each in always_too] + [(each, True) for each in of_models]


def _parsed(lines: Iterable[str], optional: bool) -> Iterator[tuple[Requirement, bool]]:
    for line in lines:
        text = line.partition("#")[0].strip()
        if text:
            yield Requirement(text), optional


def tested_versions(context_dir: Path) -> dict[str, str]:
    """Name -> version of ``constraints.txt``; empty where there is none, as beside a package that was installed."""
    file = next(
        (folder / "constraints.txt" for folder in (context_dir, ROOT) if _has_constraints(folder)), None
    )
    found = {}
    for line in file.read_text().splitlines() if file else ():
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:  # a comment
            continue
        if requirement.marker is None or requirement.marker.evaluate():
            found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


def _has_constraints(folder: Path) -> bool:
    return (folder / "constraints.txt").is_file() and (folder / "setup.cfg").is_file()


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
