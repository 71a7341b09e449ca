"""Installed versions, against determined-ds's requirements and the tested ones."""

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
from determined_ds.doctor.diagnosis import MISSING, OK, UNKNOWN, WARNING, Diagnosis

ROOT = Path(determined_ds.__file__).parents[1]
MODELS = "models"  # the extra of the templates
PYTHON = ">=3.10"


def check_versions(context_dir: Path) -> list[Diagnosis]:
    """What is installed against the requirements: a diagnosis for each package that determined-ds names."""
    here = platform.python_version()
    findings = [
        Diagnosis(
            "python",
            OK if SpecifierSet(PYTHON).contains(here, prereleases=True) else MISSING,
            here,
            needed=PYTHON,
            fix="" if SpecifierSet(PYTHON).contains(here, prereleases=True) else "use Python 3.10 or newer",
        )
    ]
    required = requirements(context_dir)
    if not required:
        return [*findings, Diagnosis("packages", UNKNOWN, "no metadata of determined-ds, no setup.cfg")]
    tested = tested_versions(context_dir)
    return [
        *findings,
        *(_version_finding(requirement, tested, optional=optional) for requirement, optional in required),
    ]


def _version_finding(requirement: Requirement, tested: dict[str, str], *, optional: bool) -> Diagnosis:
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
        return Diagnosis(name, lacking, "not installed", needed=needed, fix=install)
    fitting = fits(requirement, found)
    if fitting == OK:
        return Diagnosis(name, OK, found, needed=needed)
    if fitting == WARNING:
        message = f"{found}, built from before {Version(found).base_version} was finished"
        return Diagnosis(name, WARNING, message, needed=needed, fix=f"if it fails: {install}")
    return Diagnosis(name, lacking, found, needed=needed, fix=install)


def fits(requirement: Requirement, version: str) -> str:
    """Whether an installed version meets a requirement.

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
    """The requirements of determined-ds and of its models, with whether they are optional.

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
